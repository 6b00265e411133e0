"""The choice of the units that recompute their forward in backward, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..schedule.layout import Layout
from .costs import Costs
from .van_der_corput import spread

FINEST = 4  # the smallest change that is tried is a quarter of the eligible units
WORTH = 0.99  # a choice must be faster than this share of the best: the simulator's accuracy

# Returns whether some saved storage finds no room, and the seconds of a step.
Timed = Callable[[Layout], tuple[bool, float]]


def choose_recompute(
    layout: Layout, costs: Costs, may: Iterable[int], timed: Timed,
    now: frozenset[int] = frozenset(),
) -> frozenset[int]:  # fmt: skip
    """Return the units to recompute so that all activations fit and a step takes the least time.

    A recomputed unit costs its forward again, and frees what autograd keeps beyond its inputs.  The
    other activations move while compute runs.  So the best number of units is what the links cannot
    carry.  They are spread evenly over the model, or taken from its beginning, whose tensors are
    kept longest.

    Args:
        may: the units that can be recomputed.
        timed: simulates a layout.
        now: the units that are recomputed now; they are kept if others save too little.
    """
    able = [i for i in may if costs.saved_bytes[i] > costs.input_bytes[i]]
    if not able or sum(costs.saved_bytes) <= layout.saved.compute:
        return frozenset()
    search = _Search(layout, timed)
    search.try_out([i for i in able if i in now])
    search.try_out(())
    evenly, most = spread(able), len(able)
    search.try_out(evenly)
    search.try_out(evenly[: most // 2])
    step = most // 4
    while step and step >= most // FINEST:
        count = len(search.best)
        for other in (count - step, count + step):
            if 0 < other < most:
                search.try_out(evenly[:other])
        step //= 2
    search.try_out(able[: len(search.best)])
    return search.best


class _Search:
    """A search for the best choice of units.  The first one tried stays if others save too little.

    Choices with which all activations fit are better than faster ones with which they do not.
    """

    def __init__(self, layout: Layout, timed: Timed) -> None:
        self._layout, self._timed = layout, timed
        self._tried: set[frozenset[int]] = set()
        self._least: tuple[bool, float] | None = None
        self.best = frozenset[int]()

    def try_out(self, units: Sequence[int]) -> None:
        chosen = frozenset(units)
        if chosen in self._tried:
            return
        self._tried.add(chosen)
        found = over, seconds = self._timed(with_recompute(self._layout, chosen))
        if self._least is None or (over, seconds) < (self._least[0], WORTH * self._least[1]):
            self.best, self._least = chosen, found


def with_recompute(layout: Layout, units: frozenset[int]) -> Layout:
    """Return ``layout`` with these units recomputed."""
    return replace(layout, saved=layout.saved._replace(recompute=units))
