"""``overspill bench optim``: what an optimizer update costs on this machine."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from . import options as opt
from .failures import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from ..optim.bench import Case, UpdateCosts

WIDTH = 110  # of the table where there is no terminal
MOST_PARAMETERS = 10**9


def bench_optim(
    parameters: Annotated[
        int, typer.Option(help="Parameters of the buffer that is updated.")
    ] = 6_000_000,
    rounds: Annotated[int, typer.Option(help="Steps per figure; the median counts.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="AdamW in bf16 only, 3 rounds.")] = False,
    as_json: opt.AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for optim.json; default: it is not kept.")
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Measure updates by rule and format: with one thread, with all, and beside memory traffic.

    Rates are in 1e9 parameters per second.  The bound is the bytes of the format over the rate at
    which this machine's memory reads, changes and writes back a buffer.
    """
    from ..io_engine.atomic_files import make_folder, write_text
    from ..optim.bench import CASES, update_costs

    with one_line_errors(debug):
        if not 1 <= parameters <= MOST_PARAMETERS:
            raise ValueError(f"--parameters must be 1 to {MOST_PARAMETERS}, not {parameters}")
        if out is not None:
            make_folder(out)
        cases = CASES[:4] if quick else CASES
        costs = update_costs(
            cases=cases, numel=parameters, rounds=min(3, rounds) if quick else rounds
        )
        content = _content(costs)
        if out is not None:
            write_text(out / "optim.json", json.dumps(content, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        _show(costs)
    if out is not None:
        typer.echo(f"wrote {out / 'optim.json'}", err=as_json)


def _named(case: Case) -> dict[str, str]:
    return {
        "rule": case.rule,
        "weights": str(case.weights).removeprefix("torch."),
        "master": case.master or "none",
        "moments": case.moments if case.rule != "sgd" else "none",
    }


def _content(costs: UpdateCosts) -> dict[str, Any]:
    """The figures with what they were measured on.  Rates per second, sizes in bytes."""
    return {
        "at": datetime.now(timezone.utc).isoformat("T", "seconds"),
        "machine": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "overspill": __version__,
            "python": platform.python_version(),
        },
        **{k: v for k, v in asdict(costs).items() if k != "costs"},
        "costs": [{**asdict(cost), "case": _named(cost.case)} for cost in costs.costs],
    }


def _show(costs: UpdateCosts) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(_table(costs))
    console.print(
        f"memory: {costs.memory_bytes_s / 1e9:.1f} GB/s read, changed and written back; the "
        f"copying thread moved {costs.traffic_bytes_s / 1e9:.1f} GB/s",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _table(costs: UpdateCosts) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{costs.numel / 1e6:g} M parameters, {costs.isa}, {costs.threads} threads",
        caption="1e9 parameters per second; bytes per parameter moved by a step, and at rest; "
        "share of the bound that all threads reach",
    )
    left = ("rule", "weights", "master", "moments")
    for name in (*left, "moved", "held", "1 thread", "all", "beside traffic", "bound"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for cost in costs.costs:
        rates = (cost.one_thread, cost.all_threads, cost.beside_traffic)
        table.add_row(
            *_named(cost.case).values(),
            f"{cost.moved_bytes:.1f}",
            f"{cost.held_bytes:.1f}",
            *(f"{rate / 1e9:.2f}" for rate in rates),
            f"{cost.bound_share:.0%}",
        )
    return table
