"""``overspill bench``: what this machine can do; one file per command."""

from __future__ import annotations

import typer

from .bench_io import bench_io
from .bench_optim import bench_optim

bench_app = typer.Typer(
    help="Measure this machine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
bench_app.command("io")(bench_io)
bench_app.command("optim")(bench_optim)


@bench_app.callback()
def bench_options() -> None:
    """Measure this machine."""
