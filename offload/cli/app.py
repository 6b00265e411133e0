"""The typer application: which sub-commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench_io import bench_io
from .bench_optim import bench_optim
from .doctor import doctor
from .export import export
from .generate import generate
from .inspect import inspect
from .plan import plan
from .report import report
from .trace import trace
from .train import train

bench_app = typer.Typer(
    help="Measure this machine.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
bench_app.command("io")(bench_io)
bench_app.command("optim")(bench_optim)


@bench_app.callback()
def bench_options() -> None:
    """Measure this machine."""


app = typer.Typer(
    help="Train models that do not fit in GPU memory, on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command()(plan)
app.command()(generate)
app.command()(doctor)
app.command()(report)
app.command()(trace)
app.command()(export)
app.command()(inspect)
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"overspill {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train models that do not fit in GPU memory, on one machine."""
