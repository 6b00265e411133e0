"""Draws the pictures of the pages.

``python docs/pictures.py`` draws how-it-works.png and kill.png.  With the folder of a demo
(``python docs/pictures.py runs/demo``), it draws timeline.png and memory.png of that run, too.

Pictures have a white background of their own, so they look the same on light and dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DEVICE, HOST, NVME, UPDATE, INK, PAPER = (
    "#4477aa", "#228833", "#aa3377", "#998a00", "#222222", "white"
)  # fmt: skip
UNITS = 8
HOT = (3, 4, 5)  # units in host memory in the picture; the last but one is on the GPU
LEFT, WIDTH, STEP = 2.45, 0.98, 1.13


FOLDER = Path(__file__).parent


def main(run: Path | None, folder: Path = FOLDER) -> None:
    """Draw all pictures into ``folder``, or without ``run`` those that need no run."""
    draw_tiers(folder / "how-it-works.png")
    draw_kill(folder / "kill.png")
    if run is not None:
        from overspill.observe.memory_picture import draw_memory
        from overspill.observe.pictures import draw_timeline
        from overspill.observe.trace_files import load_trace

        trace = load_trace(run / "trace.json")
        draw_timeline(trace, folder / "timeline.png")
        draw_memory(trace, folder / "memory.png")


def blank(height: float) -> tuple[Figure, Any]:
    """Return a figure, 12 wide, and axes over all of it in the same units."""
    figure = Figure(figsize=(12, height), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 12)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def draw_kill(path: Path) -> None:
    """Draw how a step is committed, and what a resumed run finds after a kill."""
    figure, axes = blank(5.6)
    span(axes, 4.3, 2.2, 4.7, DEVICE, "step 8: forward and backward")
    span(axes, 4.3, 7.0, 4.7, DEVICE, "step 9: forward and backward")
    span(axes, 3.2, 0.3, 8.65, HOST, "copy A: the commit of step 7")
    span(axes, 3.2, 9.15, 2.55, NVME, "working copy of step 9")
    span(axes, 2.1, 0.3, 6.6, "#bbbbbb", "copy B: an old step, no longer used", ink=INK)
    span(axes, 2.1, 6.95, 1.7, NVME, "working copy\nof step 8")
    span(axes, 2.1, 9.15, 2.55, HOST, "the commit of step 8")
    for y, text in ((4.3, "compute"), (3.2, ""), (2.1, "")):
        axes.text(0.3, y + 0.32, text, fontsize=13, weight="bold", color=DEVICE)
    axes.plot((8.9, 8.9), (1.95, 4.1), color=UPDATE, linewidth=3)
    axes.text(8.9, 5.25, "the record of step 8 is written, with a checksum",
              ha="center", fontsize=10.5, color=UPDATE)  # fmt: skip
    axes.plot((8.9, 8.9), (4.98, 5.15), color=UPDATE, linewidth=3)
    kills = (
        (4.4, "killed in step 8:\nresume finds step 7"),
        (7.7, "working copy incomplete:\nresume finds step 7"),
        (10.6, "killed in step 9:\nresume finds step 8"),
    )
    for x, text in kills:
        axes.plot(
            (x, x), (1.25, 5.0), color="#cc3311", linewidth=1.6, linestyle=(0, (4, 3)), zorder=0
        )
        axes.text(x, 0.75, text, ha="center", va="center", fontsize=10.5, color="#cc3311")
    axes.text(6, 0.2, "The two copies take turns. The commit is never changed in place, so a kill "
              "at any moment leaves a whole step.", ha="center", va="center", fontsize=11,
              color=INK)  # fmt: skip
    figure.savefig(path)


def span(
    axes: Any, y: float, start: float, length: float, colour: str, text: str, ink: str = PAPER
) -> None:
    axes.add_patch(FancyBboxPatch(
        (start, y), length, 0.7, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour,
        edgecolor="none",
    ))  # fmt: skip
    axes.text(start + length / 2, y + 0.35, text, color=ink, fontsize=10, ha="center", va="center",
              linespacing=1.0)  # fmt: skip


def draw_tiers(path: Path) -> None:
    """Draw the three tiers, what they hold, and what moves between them in one step."""
    figure, axes = blank(6.2)
    tier(axes, 4.65, DEVICE, "GPU", "computes one unit\nat a time")
    tier(axes, 2.75, HOST, "host memory", "prefetches, updates")
    tier(axes, 0.55, NVME, "NVMe", "keeps everything")
    for i in range(UNITS):
        unit(axes, i, 0.75, 0.9, NVME, f"unit {i}\n\nweights\nmoments", True)
        unit(axes, i, 2.95, 0.7, HOST, "", i in HOT)
        unit(axes, i, 4.85, 0.7, DEVICE, "", i == 4)
    label(axes, 3, 3.3, "read\nahead", HOST)
    label(axes, 4, 3.3, "in use", HOST)
    label(axes, 5, 3.3, "updating", UPDATE)
    label(axes, 4, 5.2, "backward", DEVICE)
    arrow(axes, (x_of(3), 1.65), (x_of(3), 2.93), NVME)
    arrow(axes, (x_of(4) - 0.18, 3.66), (x_of(4) - 0.18, 4.83), HOST)
    arrow(axes, (x_of(4) + 0.2, 4.83), (x_of(5), 3.68), DEVICE)
    arrow(axes, (x_of(5), 2.93), (x_of(5), 1.67), UPDATE)
    say(axes, x_of(3) - 0.1, 2.3, "1  weights and moments\nare read ahead", "right")
    say(axes, x_of(4) - 0.3, 4.27, "2  weights are copied in\nbefore they are needed", "right")
    say(axes, x_of(5) + 0.05, 4.27, "3  gradients are copied out\nas they are computed", "left")
    say(
        axes,
        x_of(5) + 0.1,
        2.3,
        "4  the CPU updates in one pass,\nand the result is written back",
        "left",
    )
    axes.text(
        6, 0.2, "One moment of backward: units run from the last to the first. Reads, copies, "
        "updates and writes overlap with compute.",
        ha="center", va="center", fontsize=11, color=INK,
    )  # fmt: skip
    figure.savefig(path)


def x_of(index: int) -> float:
    """The middle of a unit's column."""
    return LEFT + STEP * index + WIDTH / 2


def tier(axes: Any, y: float, colour: str, name: str, role: str) -> None:
    height = 1.3 if colour == NVME else 1.1
    box = FancyBboxPatch(
        (0.2, y), 11.6, height, boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=colour + "18", edgecolor=colour, linewidth=1.5,
    )  # fmt: skip
    axes.add_patch(box)
    axes.text(0.4, y + height - 0.36, name, fontsize=15, weight="bold", color=colour)
    axes.text(0.4, y + height - 0.5, role, fontsize=10, color=INK, va="top")


def unit(axes: Any, i: int, y: float, height: float, colour: str, text: str, full: bool) -> None:
    box = FancyBboxPatch(
        (LEFT + STEP * i, y), WIDTH, height, boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=colour if full else "none", edgecolor=colour, alpha=1.0 if full else 0.35,
        linewidth=1, linestyle="-" if full else (0, (3, 3)),
    )  # fmt: skip
    axes.add_patch(box)
    if text:
        axes.text(x_of(i), y + height / 2, text, color=PAPER, fontsize=9, ha="center", va="center",
                  linespacing=1.0)  # fmt: skip


def label(axes: Any, i: int, y: float, text: str, colour: str) -> None:
    if colour == UPDATE:
        unit(axes, i, 2.95, 0.7, UPDATE, "", True)
    axes.text(x_of(i), y, text, color=PAPER, fontsize=9.5, ha="center", va="center")


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=18, linewidth=2.4, color=colour
        )
    )


def say(axes: Any, x: float, y: float, text: str, side: str) -> None:
    axes.text(x, y, text, fontsize=10.5, ha=side, va="center", color=INK)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
