"""The picture of a disk bench: rates and latencies over queue depth, a line per block size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import format_bytes
from .pictures import FAINT, blank_figure, save_figure

if TYPE_CHECKING:
    from ..io_engine.bench import BenchReport, Measurement

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # by block size
LINES: Mapping[str, str] = {"uring": "-", "threads": "--", "aiofiles": ":"}
TITLES: Mapping[str, str] = {"read": "read", "write": "write", "both": "read and write at once"}


def draw_disk_bench(report: BenchReport, path: Path) -> None:
    """Draw GB/s above, and median and 99 % latency below; a ring marks the chosen setting.

    Raises:
        OffloadError: matplotlib is missing.
    """
    figure, panels = blank_figure(1200, 800, rows=2, columns=len(TITLES))
    blocks = sorted({m.tuning.block_bytes for m in report.measurements})
    depths = sorted({m.tuning.queue_depth for m in report.measurements})
    for column, (mode, title) in enumerate(TITLES.items()):
        upper, lower = panels[0][column], panels[1][column]
        mine = [m for m in report.measurements if m.mode == mode]
        for key in {(m.tuning.backend, m.tuning.block_bytes): None for m in mine}:
            line = [m for m in mine if (m.tuning.backend, m.tuning.block_bytes) == key]
            colour = COLOURS[blocks.index(key[1]) % len(COLOURS)]
            _line(upper, lower, line, LINES.get(key[0], "-."), colour)
        (best,) = [m for m in mine if m.tuning == report.best]
        upper.plot(
            best.tuning.queue_depth, best.bytes_s / 1e9, "o", markersize=15,
            markerfacecolor="none", markeredgecolor="black",
        )  # fmt: skip
        upper.set_title(title)
        _axes(upper, depths, "GB/s" if column == 0 else "")
        _axes(lower, depths, "latency of a transfer, ms" if column == 0 else "")
        lower.set_yscale("log")
        lower.yaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("transfers in flight")
    top = 1.1 * max(m.bytes_s for m in report.measurements) / 1e9
    times = [s for m in report.measurements for s in (m.latency_median_s, m.latency_p99_s)]
    for column in range(len(TITLES)):  # one scale, so that panels compare
        panels[0][column].set_ylim(0, top)
        panels[1][column].set_ylim(0.7e3 * min(times), 1.5e3 * max(times))
    figure.legend(
        handles=_legend(report, blocks), loc="outside lower center", ncols=5, frameon=False
    )
    checks = "with checksums" if report.checksum else "without checksums"
    figure.suptitle(
        f"{report.directory}: {format_bytes(report.nbytes)} a pass, {checks}", fontsize=11
    )
    save_figure(figure, path)


def _line(upper: Any, lower: Any, line: Sequence[Measurement], style: str, colour: str) -> None:
    depths = [m.tuning.queue_depth for m in line]
    upper.plot(depths, [m.bytes_s / 1e9 for m in line], style, color=colour, marker="o", ms=4)
    medians = [1e3 * m.latency_median_s for m in line]
    slowest = [1e3 * m.latency_p99_s for m in line]
    lower.plot(depths, medians, style, color=colour, marker="o", ms=4)
    lower.plot(depths, slowest, style, color=colour, marker="^", ms=5, linewidth=0.8)


def _axes(axes: Any, depths: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_ylabel(label)
    axes.grid(color=FAINT, linewidth=0.4, alpha=0.6)


def _legend(report: BenchReport, blocks: Sequence[int]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[k % len(COLOURS)], label=f"blocks of {format_bytes(block)}")
        for k, block in enumerate(blocks)
    ]
    for backend in {m.tuning.backend: None for m in report.measurements}:
        handles.append(Line2D([], [], color="black", ls=LINES.get(backend, "-."), label=backend))
    marks = (("o", 4, "black", "median"), ("^", 5, "black", "99 %"), ("o", 12, "none", "picked"))
    for marker, size, face, label in marks:
        handles.append(
            Line2D([], [], color="black", ls="", marker=marker, ms=size, mfc=face, label=label)
        )
    return handles
