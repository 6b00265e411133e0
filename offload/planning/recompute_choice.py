"""The choice of the units that recompute their forward in backward, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..schedule.layout import Layout
from .costs import Costs
from .van_der_corput import spread

FINEST = 4  # the smallest change that is tried is a quarter of the eligible units
WORTH = 0.99  # a choice must be faster than this share of the best: the simulator's accuracy

# Returns whether some saved storage finds no room, and the seconds of a step.
Timed = Callable[[Layout], tuple[bool, float]]


class Recomputed(NamedTuple):
    """The units that are recomputed, and those of them that keep the outputs of attention."""

    units: frozenset[int] = frozenset()
    keep_attention: frozenset[int] = frozenset()


NOTHING = Recomputed()


def choose_recompute(
    layout: Layout, costs: Costs, may: Iterable[int], timed: Timed, now: Recomputed = NOTHING
) -> Recomputed:
    """Return the units to recompute so that all activations fit and a step takes the least time.

    A recomputed unit costs its forward again, and frees what autograd keeps beyond its inputs.  The
    other activations move while compute runs.  So the best number of units is what the links cannot
    carry.  They are spread evenly over the model, or taken from its beginning, whose tensors are
    kept longest.  Some or all of them keep the outputs of attention, if that is known to take time.

    Args:
        may: the units that can be recomputed.
        timed: simulates a layout.
        now: the present choice; it is kept if others save too little.
    """
    able = [i for i in may if costs.saved_bytes[i] > costs.input_bytes[i]]
    if not able or sum(costs.saved_bytes) <= layout.saved.compute:
        return NOTHING
    search = _Search(layout, costs, timed)
    search.try_out([i for i in able if i in now.units], now.keep_attention)
    search.try_out(())
    evenly, most = spread(able), len(able)
    search.try_out(evenly)
    search.try_out(evenly[: most // 2])
    step = most // 4
    while step and step >= most // FINEST:
        count = len(search.best.units)
        for other in (count - step, count + step):
            if 0 < other < most:
                search.try_out(evenly[:other])
        step //= 2
    search.try_out(able[: len(search.best.units)])
    _keep_attention(search, costs, evenly)
    return search.best


def _keep_attention(search: _Search, costs: Costs, able: Sequence[int]) -> None:
    """Try to keep the outputs of attention, in more, as many or fewer units than without them."""
    takes = frozenset(i for i in able if costs.attention_s and costs.attention_s[i] > 0)
    if not takes:
        return
    search.try_out(sorted(search.best.units), takes)
    step = len(able) // 2
    while step and step >= len(able) // FINEST:
        count = len(search.best.units)
        for other in (count - step, count + step, len(able)):
            if 0 < other <= len(able):
                search.try_out(able[:other], takes)
        step //= 2
    chosen = search.best
    half = frozenset(sorted(chosen.keep_attention)[::2])
    search.try_out(sorted(chosen.units), half)


class _Search:
    """A search for the best choice of units.  The first one tried stays if others save too little.

    Choices with which all activations fit are better than faster ones with which they do not.  If
    they never fit, the choice that keeps least is best.
    """

    def __init__(self, layout: Layout, costs: Costs, timed: Timed) -> None:
        self._layout, self._costs, self._timed = layout, costs, timed
        self._tried: set[Recomputed] = set()
        self._least: tuple[bool, float] | None = None
        self.best = NOTHING

    def try_out(self, units: Sequence[int], keep: frozenset[int] = frozenset()) -> None:
        chosen = Recomputed(frozenset(units), keep.intersection(units))
        if chosen in self._tried:
            return
        self._tried.add(chosen)
        tried = with_recompute(self._layout, chosen)
        over, seconds = self._timed(tried)
        found = over, float(self._kept_bytes(tried)) if over else seconds
        if self._least is None or found < (self._least[0], WORTH * self._least[1]):
            self.best, self._least = chosen, found

    def _kept_bytes(self, layout: Layout) -> int:
        costs, saved = self._costs, layout.saved
        again = saved.recompute
        kept = sum(
            costs.input_bytes[i] if i in again else n for i, n in enumerate(costs.saved_bytes)
        )
        return kept + sum(costs.kept_bytes(i, saved) for i in again)


def with_recompute(layout: Layout, chosen: Recomputed) -> Layout:
    """Return ``layout`` with these units recomputed."""
    saved = layout.saved._replace(recompute=chosen.units, keep_attention=chosen.keep_attention)
    return replace(layout, saved=saved)
