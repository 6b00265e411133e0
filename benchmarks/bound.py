"""Step time over its lower bound, with each lane in turn the slowest: does the schedule overlap?

Runs on ``sim`` at rates so slow that a loaded machine hardly matters: every lane but one needs a
share of the chosen time, that one all of it, and what is measured is the schedule alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from .model import Shape
from .results import Column, Comparison, Outcome, number, outcome
from .runner import Row, Sample
from .sim_machine import LANES, SimMachine, measure, slowest

MODES = ("step", "backward", "next_forward")
DEEP = Shape(layers=32, width=128, heads=4, vocabulary=256, batch=1, tokens=16)


def in_phases(lanes: Mapping[str, float], update: str) -> float:
    """Seconds of a step whose forward, backward and updates each take as long as their slowest
    lane: what a schedule without any room to spare can reach.  ``step_bound`` may be less: it
    knows what memory lets come early or go late.

    Args:
        lanes: seconds of a step by lane; weights are not on disk.
    """
    forward = max(lanes["compute"] / 3, lanes["copy_in"] / 2)
    backward = max(lanes["compute"] * 2 / 3, lanes["copy_in"] / 2, lanes["copy_out"])
    late = max(lanes["read"], lanes["write"], lanes["update"])
    if update == "backward":
        return forward + max(backward, late)
    if update == "next_forward":
        return backward + max(forward, late)
    return forward + backward + late


def _row(update: str, lane: str, seconds: float, steps: int) -> Row:
    name, lanes = f"{update}, {lane}", slowest(lane, seconds)
    try:
        seen = measure(SimMachine(DEEP, update, lanes), steps=steps)
    except Exception as error:  # an arm that fails is a row with its error
        return Row(name, {}, (), error=f"{type(error).__name__}: {error}")
    about = {
        "bound_s": seen.bound_s,
        "phases_s": in_phases(lanes, update),
        "covered": seen.covered,
        "stalls": seen.stalls,
    }
    samples = tuple(Sample(s, about) for s in seen.all_s)
    ratios = [s / seen.bound_s for s in seen.all_s]
    return Row(
        name, {}, samples, None, seen.step_s, statistics.median(ratios), min(ratios), max(ratios)
    )


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite: each way to update, with each lane in turn the slowest."""
    seconds, steps = (0.6, 2) if quick else (1.5, 3)
    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("bound", lambda row: number(row.samples[-1].seen["bound_s"] if row.samples else None)),
        ("over bound", lambda row: number(row.ratio)),
        ("over phases", _over_phases),
        (
            "under compute",
            lambda row: f"{row.samples[-1].seen['covered']:.0%}" if row.samples else "-",
        ),
        ("waits for", _waits),
    ]
    comparisons = [
        Comparison(
            f"Step time over its bound, update='{update}'",
            {"seconds": seconds, "steps": steps},
            [_row(update, lane, seconds, steps) for lane in LANES],
            columns,
        )
        for update in MODES
    ]
    return outcome("bound", comparisons, folder)


def _over_phases(row: Row) -> str:
    if not row.samples or row.median_s is None:
        return "-"
    return number(row.median_s / row.samples[-1].seen["phases_s"])


def _waits(row: Row) -> str:
    stalls = row.samples[-1].seen["stalls"] if row.samples else {}
    named = sorted(((s, lane) for lane, s in stalls.items() if s >= 0.02), reverse=True)
    return ", ".join(f"{lane} {s:.2f} s" for s, lane in named) or "nothing"
