"""The steady state of simulated steps: the average time, bytes moved and memory of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..facts.stats import Stats, step_stats
from ..facts.tier import Tier
from ..facts.trace import StepMark, Trace
from ..schedule.layout import Layout
from .costs import Costs
from .simulate import LINKS, Simulation

RECORDING_STEPS = 1  # the first step records the order of uses
FILLING_STEPS = 1  # without training, the next step is the first that prefetches beyond its end
WARM_STEPS = 3  # about as many steps differ from the later ones
MOST_STEPS = 9  # steps to simulate if they do not repeat
LONGEST_PERIOD = 3  # longest cycle of alternating steps to detect
SAME_SHARE = 1e-4  # largest relative difference in time between a step and its repetition
LIKE_SHARE = 1e-2  # largest relative difference in time among three similar steps


@dataclass(frozen=True)
class Simulated:
    """The steady state of simulated steps.

    Attributes:
        stats: the figures of an average step.
        link_bytes: by lane, the bytes that an average step moves.
        peak_bytes: by tier, the most bytes in use.
        trace: all spans of all simulated steps.
        overflows: whether some saved storage found no room.
    """

    stats: Stats
    link_bytes: dict[str, int]
    peak_bytes: dict[Tier, int]
    trace: Trace
    overflows: bool


def simulate(
    layout: Layout, costs: Costs, *, micro_steps: int, update: str, commit: bool = False,
    most_steps: int = MOST_STEPS, hopeless_s: float = math.inf,
) -> Simulated:  # fmt: skip
    """Simulate steps until they repeat, or ``most_steps`` of them.

    Once a step has taken ``hopeless_s`` or more, the simulation ends, and that step is the result.
    The first ``WARM_STEPS`` - 1 steps do not count for this.

    What one step leaves in memory decides what the next one reads, so steps may alternate between
    several kinds, and some never repeat.

    Args:
        commit: whether each step is committed.
    """
    run = Simulation(layout, costs)
    unlike = RECORDING_STEPS + (0 if layout.trains else FILLING_STEPS)
    lasted: list[float] = []
    moved = [dict(run.moved)]
    count = 0
    while not count and len(lasted) < most_steps:
        lasted.append(run.step(micro_steps, update, commit=commit))
        moved.append(dict(run.moved))
        count = _repeated(lasted[unlike:])
        if not count and len(lasted) >= WARM_STEPS and lasted[-1] >= hopeless_s:
            count = 1
    count = count or max(1, most_steps - WARM_STEPS)
    marks = run.trace.steps[-count:]
    whole = StepMark(marks[0].index, marks[0].started_ns, marks[-1].finished_ns)
    stats = step_stats(run.trace, whole, {}).per_step(count)
    links = {lane: (moved[-1][lane] - moved[-1 - count][lane]) // count for lane in LINKS}
    return Simulated(stats, links, run.peak_bytes, run.trace, run.overflows)


def _repeated(lasted: Sequence[float]) -> int:
    """Return how many of the last steps represent all later ones: a cycle and its repetition, or
    three similar steps.  0: they do not repeat yet."""
    if len(lasted) >= 3 and max(lasted[-3:]) - min(lasted[-3:]) < LIKE_SHARE * lasted[-1]:
        return 3
    for period in range(1, LONGEST_PERIOD + 1):
        rounds = lasted[-2 * period :]
        pairs = zip(rounds, rounds[period:], strict=False)
        if len(rounds) == 2 * period and all(abs(a - b) < SAME_SHARE * b for a, b in pairs):
            return 2 * period
    return 0
