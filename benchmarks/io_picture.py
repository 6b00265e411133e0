"""The picture of the disk suite: rates as bars, every sample as a dot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from overspill.observe.pictures import FAINT, PIXELS_PER_INCH, blank_figure

from .results import Comparison
from .runner import Row

COLOURS = {"overspill": "#4477aa", "fio": "#ccbb44", "DeepSpeed": "#ee6677"}
ROW_PX, HEAD_PX = 26, 70


def draw_rates(comparisons: Sequence[Comparison], path: Path) -> None:
    """One panel a comparison: the median rate of every arm, and CPU-seconds per GB beside it.

    Raises:
        OffloadError: matplotlib is missing.
    """
    rows = [[row for row in c.rows if row.samples] for c in comparisons]
    heights = [HEAD_PX + ROW_PX * max(1, len(mine)) for mine in rows]
    figure, panels = blank_figure(1200, sum(heights) + 20, rows=len(comparisons))
    panels = [panels] if len(comparisons) == 1 else list(panels)
    panels[0].get_gridspec().set_height_ratios(heights)
    best = 0.0
    for axes, comparison, mine in zip(panels, comparisons, rows, strict=True):
        moved = float(comparison.settings["moved_bytes"])
        for place, row in enumerate(mine):
            rates = [moved / sample.seconds / 1e9 for sample in row.samples]
            middle = statistics.median(rates)
            best = max(best, *rates)
            axes.barh(place, middle, height=0.7, color=_colour(row), alpha=0.75)
            axes.plot(rates, [place] * len(rates), ".", color="black", markersize=3)
            cpu_s = statistics.median(sample.seen["cpu_s"] for sample in row.samples)
            axes.text(
                1.01, place, f"{middle:.2f} GB/s, CPU {cpu_s / moved * 1e9:.3f} s/GB",
                transform=axes.get_yaxis_transform(), va="center", fontsize=9,
            )  # fmt: skip
        axes.set_yticks(range(len(mine)), [row.name for row in mine])
        axes.set_ylim(len(mine) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=FAINT, linewidth=0.4, alpha=0.6)
        axes.set_title(comparison.title, loc="left", fontsize=10)
    for axes in panels:
        axes.set_xlim(0, 1.03 * best)
    panels[-1].set_xlabel("GB/s (1e9 bytes per second); bars: medians, dots: samples")
    figure.savefig(path, dpi=PIXELS_PER_INCH)


def _colour(row: Row) -> str:
    return next((c for name, c in COLOURS.items() if row.name.startswith(name)), FAINT)
