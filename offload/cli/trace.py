"""``overspill trace``: the lanes of a saved trace as a picture, and what compute waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .failures import one_line_errors


def trace(
    file: Annotated[Path, typer.Argument(help="Chrome trace JSON, as a run or a plan writes it.")],
    png: Annotated[
        Path | None, typer.Option(help="Where to draw the lanes; default: beside the file.")
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Also draw memory against its budgets, to this PNG file.")
    ] = None,
    planned: Annotated[
        Path | None, typer.Option(help="A simulated trace (overspill plan --trace) to lay beside.")
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Draw the last steps of a trace, lane by lane, and say which lane compute waited for."""
    with one_line_errors(debug):
        from ..facts.stats import step_stats
        from ..observe.memory_picture import draw_memory
        from ..observe.pictures import draw_timeline
        from ..observe.trace_files import load_trace

        loaded = load_trace(file)
        path = file.with_suffix(".png") if png is None else png
        plan = None if planned is None else load_trace(planned)
        draw_timeline(loaded, path, plan)
        if memory is not None:
            draw_memory(loaded, memory, plan)
        stats = step_stats(loaded, loaded.steps[-1], {})
    typer.echo(f"step {loaded.steps[-1].index}: {stats.step_s:.3g} s, {stats.explain()}")
    typer.echo(f"wrote {path}")
    if memory is not None:
        typer.echo(f"wrote {memory}")
