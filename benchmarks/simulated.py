"""The simulator against runs on ``sim``: machines, models and budgets drawn by a seed."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import overspill

from .model import Shape
from .results import Column, Comparison, Outcome, number, outcome
from .runner import Row, Sample
from .sim_machine import LANES, Measured, SimMachine, measure, meta_model

MACHINES = 30
MEDIAN_GOAL, TENTH_GOAL = 0.05, 0.12


def draw(seed: int, slowness: float = 1.0) -> SimMachine:
    """A machine by its seed; every lane needs 0.15 to 0.6 s a step, times ``slowness``."""
    rng = random.Random(seed)
    shape = Shape(
        layers=rng.randint(8, 24), width=rng.choice([64, 96, 128]), heads=4,
        vocabulary=256, batch=1, tokens=16,
    )  # fmt: skip
    params = sum(p.numel() for p in meta_model(shape).parameters())
    return SimMachine(
        shape,
        ("step", "backward", "next_forward")[seed % 3],
        {lane: rng.uniform(0.15, 0.6) * slowness for lane in LANES},
        {
            "device_memory": int(params * rng.uniform(0.4, 2.0)),
            "host_memory": int(params * rng.uniform(1.5, 12.0)),
            "prefetch_depth": rng.choice([None, 1, 2, 4, 6]),
        },
    )


def measure_drawn(seed: int, slowness: float = 1.0, steps: int = 3) -> Measured | None:
    """The drawn machine measured and simulated; ``None`` where the model does not fit it."""
    try:
        return measure(draw(seed, slowness), steps=steps)
    except overspill.BudgetError:
        return None


def _row(seed: int, seen: Measured) -> Row:
    machine = draw(seed)
    return Row(
        f"{seed}: {machine.update}, {machine.shape.layers} layers",
        {},
        tuple(
            Sample(s, {"simulated_s": seen.simulated.stats.step_s, "same_peaks": seen.same_peaks})
            for s in seen.all_s
        ),
        median_s=seen.step_s,
        ratio=seen.simulated.stats.step_s / seen.step_s,
    )


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite: 30 machines, or 5; the last rows sum up."""
    rows: list[Row] = []
    errors: list[float] = []
    same = seed = 0
    while len(rows) < (5 if quick else MACHINES):
        seen = measure_drawn(seed)
        if seen is not None:
            rows.append(_row(seed, seen))
            errors.append(seen.error)
            same += seen.same_peaks
        seed += 1
    errors.sort()
    tenth = errors[min(len(errors) - 1, round(0.9 * len(errors)))]
    title = (
        f"Simulated step time over measured; error {statistics.median(errors):.1%} at the median "
        f"(goal {MEDIAN_GOAL:.0%}), {tenth:.1%} at the 90th percentile (goal {TENTH_GOAL:.0%}); "
        f"bytes held as planned and peaks in use as simulated on {same} of {len(rows)}"
    )
    columns: list[Column] = [
        ("measured", lambda row: number(row.median_s, " s")),
        ("simulated", lambda row: number(row.samples[-1].seen["simulated_s"], " s")),
        ("ratio", lambda row: number(row.ratio)),
        ("peaks", lambda row: "the same" if row.samples[-1].seen["same_peaks"] else "other"),
    ]
    return outcome("simulated", [Comparison(title, {"errors": errors}, rows, columns)], folder)
