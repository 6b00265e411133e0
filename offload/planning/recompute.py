"""Which units compute their forward again in backward: as the simulator says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..schedule.layout import Layout
from .costs import Costs
from .spread import spread

PARTS = 4  # the numbers of units that are tried: none, a quarter of them, a half, ...
WORTH = 0.99  # another choice must save this much: the simulator is no better than that

# Whether what is kept finds no room for once, and the seconds of a step.
Timed = Callable[[Layout], tuple[bool, float]]


def choose_recompute(
    layout: Layout, costs: Costs, may: Iterable[int], timed: Timed
) -> frozenset[int]:
    """The units, of those that ``may``, with which all has room and a step takes least time.

    What is computed again costs its forward and frees what its autograd keeps beyond its inputs;
    what is left moves behind compute.  So as many are taken as the links cannot carry: evenly over
    the model, or from its beginning on, whose tensors stay longest.
    """
    able = [i for i in may if costs.saved_bytes[i] > costs.input_bytes[i]]
    if not able or sum(costs.saved_bytes) <= layout.saved.compute:
        return frozenset()
    best = frozenset[int]()
    best_over, best_s = timed(layout)
    tried = {best}

    def try_out(units: Iterable[int]) -> None:
        nonlocal best, best_over, best_s
        chosen = frozenset(units)
        if chosen in tried:
            return
        tried.add(chosen)
        over, taken_s = timed(with_recompute(layout, chosen))
        if (over, taken_s) < (best_over, WORTH * best_s):
            best, best_over, best_s = chosen, over, taken_s

    orders = (spread(able), able)
    for order in orders:
        for part in range(1, PARTS + 1):
            try_out(order[: len(able) * part // PARTS])
    found = len(best)
    for order in orders:  # and once more, closer by
        for count in _beside(found, len(able)):
            try_out(order[:count])
    return best


def _beside(count: int, most: int) -> Sequence[int]:
    step = max(1, most // (2 * PARTS))
    return [n for n in (count - step, count + step) if 0 < n <= most]


def with_recompute(layout: Layout, units: frozenset[int]) -> Layout:
    """``layout`` where these units compute again."""
    return replace(layout, saved=layout.saved._replace(recompute=units))
