"""Pictures of results: medians as bars, every sample as a dot; and how cost grows with size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill import OffloadError
from overspill.observe.pictures import FAINT, PIXELS_PER_INCH, blank_figure

from .results import Comparison, number
from .runner import Row

OURS, TORCH, PEERS = "#4477aa", "#228833", "#ee6677"
ROW_PX, HEAD_PX = 30, 70
GIB = 1 << 30


@dataclass(frozen=True)
class Bar:
    """``values``: of each sample; the bar is their median.  ``note``: text at the right."""

    name: str
    values: Sequence[float]
    note: str


@dataclass(frozen=True)
class Panel:
    """Bars that share an axis."""

    title: str
    bars: Sequence[Bar]


def draw_bars(panels: Sequence[Panel], label: str, path: Path) -> None:
    """One panel under the other, each with an axis of its own.

    Raises:
        OffloadError: matplotlib is missing.
    """
    heights = [HEAD_PX + ROW_PX * max(1, len(panel.bars)) for panel in panels]
    figure, found = blank_figure(1100, sum(heights) + 30, rows=len(panels))
    all_axes = [found] if len(panels) == 1 else list(found)
    all_axes[0].get_gridspec().set_height_ratios(heights)
    for axes, panel in zip(all_axes, panels, strict=True):
        for place, bar in enumerate(panel.bars):
            axes.barh(place, statistics.median(bar.values), 0.7, color=_colour(bar), alpha=0.8)
            axes.plot(bar.values, [place] * len(bar.values), ".", color="black", markersize=3)
            where = axes.get_yaxis_transform()
            axes.text(1.01, place, bar.note, transform=where, va="center", fontsize=9)
        axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
        axes.set_ylim(max(1, len(panel.bars)) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=FAINT, linewidth=0.4, alpha=0.6)
        axes.set_title(panel.title, loc="left", fontsize=10)
    all_axes[-1].set_xlabel(label)
    figure.savefig(path, dpi=PIXELS_PER_INCH)


def _colour(bar: Bar) -> str:
    ours = bar.name.startswith("overspill")
    return OURS if ours else TORCH if bar.name.startswith("torch,") else PEERS


def draw_times(comparisons: Sequence[Comparison], path: Path) -> None:
    """Step times of all arms that have any, with ratio, loss and peak memory beside them.

    Without matplotlib it says so and draws nothing.
    """

    def note(row: Row) -> str:
        seen = row.samples[-1].seen
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x, "
        peak = number(seen["peak_rss_bytes"] / GIB, " GiB")
        return f"{ratio}loss {seen['loss']:.4f}, {peak}"

    panels = []
    for comparison in comparisons:
        rows = [row for row in comparison.rows if row.samples]
        if rows:
            bars = [Bar(r.name, [s.seconds for s in r.samples], note(r)) for r in rows]
            panels.append(Panel(comparison.title, bars))
    label = "seconds a step; bars: medians, dots: samples; at the right: over the first, peak RSS"
    if panels:
        or_say(lambda: draw_bars(panels, label, path))


def or_say(draw: Callable[[], None]) -> None:
    """Draws; where matplotlib is missing, says so."""
    try:
        draw()
    except OffloadError as error:
        print(error)


def draw_growth(
    sizes: Sequence[float], panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[float]]]]],
    path: Path,
) -> None:  # fmt: skip
    """Lines over the number of parameters, in millions; each panel has a label and named lines.

    Raises:
        OffloadError: matplotlib is missing.
    """
    figure, found = blank_figure(420 * len(panels), 360, columns=len(panels))
    all_axes: list[Any] = [found] if len(panels) == 1 else list(found)
    colours = (OURS, PEERS, TORCH)
    for axes, (label, lines) in zip(all_axes, panels, strict=True):
        for colour, (name, values) in zip(colours, lines, strict=False):
            axes.plot(sizes, values, "o-", color=colour, label=name, markersize=4)
        axes.set_xlabel("million parameters")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(color=FAINT, linewidth=0.4, alpha=0.6)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=PIXELS_PER_INCH)
