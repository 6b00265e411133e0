"""``overspill report``: a run as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .failures import one_line_errors


def report(
    run: Annotated[Path, typer.Argument(help="The folder that `overspill train --out` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: report.html in RUN.")
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Write a run as one page of HTML: figures, loss, lanes, memory, and what to change next."""
    with one_line_errors(debug):
        from ..io_engine.atomic_files import write_text
        from ..observe.page import PAGE, page_of

        path = run / PAGE if out is None else out
        write_text(path, page_of(run))
    typer.echo(f"wrote {path}")
