"""The picture of the optimizer suite: time per parameter as bars, every sample as a dot, and the
time that the bytes alone would take as a line."""

from __future__ import annotations

import statistics
from pathlib import Path

from overspill.observe.pictures import FAINT, PIXELS_PER_INCH, blank_figure

from .results import Comparison

OURS, THEIRS = "#4477aa", "#ee6677"
ROW_PX, HEAD_PX = 30, 90


def draw_updates(comparison: Comparison, path: Path) -> None:
    """One bar an arm.

    Raises:
        OffloadError: matplotlib is missing.
    """
    numel = float(comparison.settings["numel"])
    rows = [row for row in comparison.rows if row.samples]
    figure, axes = blank_figure(1000, HEAD_PX + ROW_PX * max(1, len(rows)))
    sweep = next((row for row in rows if row.facts.get("sweep")), None)
    for place, row in enumerate(rows):
        times = [sample.seconds / numel * 1e9 for sample in row.samples]
        middle = statistics.median(times)
        colour = OURS if row.name.startswith("overspill") else FAINT if row is sweep else THEIRS
        axes.barh(place, middle, height=0.7, color=colour, alpha=0.8)
        axes.plot(times, [place] * len(times), ".", color="black", markersize=3)
        axes.text(
            1.01, place, f"{middle:.2f} ns", transform=axes.get_yaxis_transform(), va="center"
        )
        if sweep is not None and sweep.median_s:
            bound = row.facts["bytes"] / sweep.facts["bytes"] * sweep.median_s / numel * 1e9
            axes.plot([bound, bound], [place - 0.4, place + 0.4], color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.set_title(comparison.title, loc="left", fontsize=10)
    axes.set_xlabel("ns per parameter; line: the arm's bytes at the memory's rate; dots: samples")
    figure.savefig(path, dpi=PIXELS_PER_INCH)
