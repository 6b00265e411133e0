"""The steady state of simulated steps: what one takes, moves and holds, on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..facts.stats import Stats, step_stats
from ..facts.tier import Tier
from ..facts.trace import StepMark, Trace
from ..schedule.layout import Layout
from .costs import Costs
from .simulate import LINKS, Simulation

RECORDING_STEPS = 1  # the first one records the order of uses
FILLING_STEPS = 1  # where nothing is trained, the next one brings what is read ahead of its end
WARM_STEPS = 3  # about as many are unlike those that follow
MOST_STEPS = 9  # where steps do not repeat
LONGEST_PERIOD = 3  # of steps that take turns
SAME_SHARE = 1e-4  # by which the times of a step and its repetition differ at most
LIKE_SHARE = 1e-2  # by which those of three like steps do


@dataclass(frozen=True)
class Simulated:
    """The steady state: a step's figures and bytes on average, the most in use by tier, all spans,
    and whether what autograd saved found no room for once."""

    stats: Stats
    link_bytes: dict[str, int]
    peak_bytes: dict[Tier, int]
    trace: Trace
    overflows: bool


def simulate(
    layout: Layout, costs: Costs, *, micro_steps: int, update: str, commit: bool = False,
    most_steps: int = MOST_STEPS,
) -> Simulated:  # fmt: skip
    """Runs steps until they repeat, or ``most_steps`` of them; ``commit``: each is committed.

    What one step leaves in memory decides what the next one reads, so that kinds of steps may take
    turns; some never repeat.
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
    count = count or max(1, most_steps - WARM_STEPS)
    marks = run.trace.steps[-count:]
    whole = StepMark(marks[0].index, marks[0].started_ns, marks[-1].finished_ns)
    stats = step_stats(run.trace, whole, {}).per_step(count)
    links = {lane: (moved[-1][lane] - moved[-1 - count][lane]) // count for lane in LINKS}
    return Simulated(stats, links, run.peak_bytes, run.trace, run.overflows)


def _repeated(lasted: Sequence[float]) -> int:
    """How many of the last steps stand for those to come: all of a round and its repetition, or
    three that are alike; 0: they do not yet."""
    if len(lasted) >= 3 and max(lasted[-3:]) - min(lasted[-3:]) < LIKE_SHARE * lasted[-1]:
        return 3
    for period in range(1, LONGEST_PERIOD + 1):
        rounds = lasted[-2 * period :]
        pairs = zip(rounds, rounds[period:], strict=False)
        if len(rounds) == 2 * period and all(abs(a - b) < SAME_SHARE * b for a, b in pairs):
            return 2 * period
    return 0
