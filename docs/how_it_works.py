"""Draws docs/how-it-works.png: `python docs/how_it_works.py`."""

from __future__ import annotations

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


def main() -> None:
    """Draws the three tiers, what they hold, and what moves between them in one step."""
    figure = Figure(figsize=(12, 6.2), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 12)
    axes.set_ylim(0, 6.2)
    axes.axis("off")
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
    say(axes, x_of(5) + 0.05, 4.27, "3  gradients leave\nas soon as they are there", "left")
    say(
        axes,
        x_of(5) + 0.1,
        2.3,
        "4  the CPU updates in one pass,\nand the result is written back",
        "left",
    )
    axes.text(
        6, 0.2, "One moment of backward: units run from the last to the first; reads, copies, "
        "updates and writes go on beside the compute.",
        ha="center", va="center", fontsize=11, color=INK,
    )  # fmt: skip
    figure.savefig(Path(__file__).with_name("how-it-works.png"))


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
    main()
