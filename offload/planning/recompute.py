"""Which units compute their forward again in backward: as the simulator says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..schedule.layout import Layout
from .costs import Costs
from .van_der_corput import spread

FINEST = 4  # the least difference of what is tried: a quarter of the units that may
WORTH = 0.99  # another choice must save this much: the simulator is no better than that

# Whether what is kept finds no room for once, and the seconds of a step.
Timed = Callable[[Layout], tuple[bool, float]]


def choose_recompute(
    layout: Layout, costs: Costs, may: Iterable[int], timed: Timed,
    now: frozenset[int] = frozenset(),
) -> frozenset[int]:  # fmt: skip
    """The units, of those that ``may``, with which all has room and a step takes least time; those
    of ``now`` where others save too little.

    What is computed again costs its forward and frees what its autograd keeps beyond its inputs;
    what is left moves behind compute.  So as many are taken as the links cannot carry: evenly over
    the model, or from its beginning on, whose tensors stay longest.
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
    """The best of what was tried; the one tried first where others save too little."""

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
    """``layout`` where these units compute again."""
    return replace(layout, saved=layout.saved._replace(recompute=units))
