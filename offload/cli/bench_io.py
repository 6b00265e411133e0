"""``overspill bench io``: how fast a directory is, and with which setting."""

from __future__ import annotations

import json
import os
import platform
import sys
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

    from ..io_engine.backend import Tuning
    from ..io_engine.bench import BenchReport, Measurement

SIZE, QUICK_SIZE = "256MiB", "64MiB"
QUICK_BLOCKS, QUICK_DEPTHS = ("1MiB", "4MiB"), (4, 16)
WIDTH = 110  # of the table where there is no terminal


def bench_io(
    directory: Annotated[Path, typer.Option("--dir", help="The directory to try.")],
    size: Annotated[
        str | None, typer.Option(help=f"Bytes moved per pass; default {SIZE}, quick {QUICK_SIZE}.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="uring, threads or aiofiles; may be repeated; default: all that work."),
    ] = None,
    block: Annotated[
        list[str] | None,
        typer.Option(help="Bytes of one transfer; may be repeated; default: 128KiB 1MiB 4MiB."),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(help="Transfers in flight; may be repeated; default: 4 16 32."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Passes per figure; the median counts.")
    ] = None,
    checksum: Annotated[
        bool, typer.Option("--checksum/--no-checksum", help="With the cost of checking.")
    ] = True,
    keep: Annotated[
        bool,
        typer.Option("--keep/--no-keep", help="Remember the best setting for this directory."),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer settings, once each.")] = False,
    as_json: opt.AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for io.json and io.png; default: neither is kept.")
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Measure reading, writing and both at once on a directory; remember the best setting.

    Rates are in 1e9 bytes per second, CPU in core-seconds of this process per 1e9 bytes, latencies
    those of single transfers of one block.
    """
    from ..io_engine.bench import DEFAULT_BLOCKS, DEFAULT_DEPTHS, bench

    with one_line_errors(debug):
        if out is not None:
            _prepare(out)
        report = bench(
            directory,
            nbytes=_bytes(size or (QUICK_SIZE if quick else SIZE), "--size"),
            backends=backend or None,
            block_sizes=[_bytes(text, "--block") for text in block or (QUICK_BLOCKS * quick)]
            or DEFAULT_BLOCKS,
            queue_depths=depth or (QUICK_DEPTHS if quick else DEFAULT_DEPTHS),
            rounds=rounds if rounds is not None else 1 if quick else 3,
            checksum=checksum,
            keep=keep,
            progress=_tell,
        )
        content = _content(report)
        files = _save(report, content, out) if out is not None else []
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        _show(report)
    for file in files:
        typer.echo(f"wrote {file}", err=as_json)


def _bytes(text: str, name: str) -> int:
    from ..config import parse_size

    nbytes = parse_size(text, name).nbytes
    if not nbytes:
        raise ValueError(f"{name}: {text!r} is no size to move; write '1MiB'")
    return nbytes


def _named(tuning: Tuning) -> str:
    from ..errors import format_bytes

    block = format_bytes(tuning.block_bytes)
    return f"{tuning.backend}, blocks of {block}, {tuning.queue_depth} in flight"


def _tell(m: Measurement) -> None:
    """Print a figure on a terminal as it is measured; results are printed at the end."""
    if sys.stderr.isatty():
        typer.echo(f"{_named(m.tuning)}: {m.mode} {m.bytes_s / 1e9:.2f} GB/s", err=True)


def _content(report: BenchReport) -> dict[str, Any]:
    """The report with what it was measured on.  Sizes in bytes, times in seconds."""
    system = os.statvfs(report.directory)
    return {
        "at": datetime.now(timezone.utc).isoformat("T", "seconds"),
        "machine": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "free_bytes": system.f_bavail * system.f_frsize,
            "overspill": __version__,
            "python": platform.python_version(),
        },
        **asdict(report),
    }


def _prepare(out: Path) -> None:
    """Refuses what would otherwise fail when all has been measured."""
    from ..io_engine.atomic_files import make_folder
    from ..observe.pictures import blank_figure

    blank_figure(100, 100)
    make_folder(out)


def _save(report: BenchReport, content: dict[str, Any], out: Path) -> list[Path]:
    from ..io_engine.atomic_files import write_text
    from ..observe.disk_pictures import draw_disk_bench

    data, picture = out / "io.json", out / "io.png"
    write_text(data, json.dumps(content, indent=1) + "\n")
    draw_disk_bench(report, picture)
    return [data, picture]


def _show(report: BenchReport) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(_table(report))
    console.print(f"best: {_named(report.best)}", highlight=False)
    if report.kept_in is not None:
        console.print(
            f"kept in {report.kept_in}: used from now on for {report.directory}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    else:
        console.print("not kept", highlight=False)


def _table(report: BenchReport) -> Table:
    from rich.table import Table

    from ..errors import format_bytes

    checked = "with" if report.checksum else "without"
    table = Table(
        title=f"{report.directory}: {format_bytes(report.nbytes)} a pass, {checked} checksums",
        caption="GB/s (both: reads and writes together); CPU-s per GB; "
        "latency of a transfer: median / 99 % / longest, ms",
    )
    for name in (
        "backend",
        "block",
        "depth",
        "read",
        "write",
        "both",
        "CPU",
        "read ms",
        "write ms",
    ):
        table.add_column(name, justify="left" if name == "backend" else "right", no_wrap=True)
    for tuning in {m.tuning: None for m in report.measurements}:
        by_mode = {m.mode: m for m in report.measurements if m.tuning == tuning}
        cpu = sum(m.cpu_s_per_gb for m in by_mode.values()) / len(by_mode)
        table.add_row(
            tuning.backend,
            format_bytes(tuning.block_bytes),
            str(tuning.queue_depth),
            *(f"{by_mode[mode].bytes_s / 1e9:.2f}" for mode in by_mode),
            f"{cpu:.3f}",
            _latency(by_mode["read"]),
            _latency(by_mode["write"]),
            style="bold" if tuning == report.best else None,
        )
    return table


def _latency(m: Measurement) -> str:
    seconds = (m.latency_median_s, m.latency_p99_s, m.latency_max_s)
    return " / ".join(f"{1e3 * s:.3g}" for s in seconds)
