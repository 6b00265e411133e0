"""Chooses among layouts by what the simulator says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..observe.rates import Rates
from .coarse import coarsen
from .costs import Costs, Profile
from .layout import Layout
from .partition import Partition
from .plan import Budgets, Needs, Preference, Shortfall
from .planner import DEFAULT_DEPTH, make_layout
from .simulate import Simulated, simulate

DEPTHS = (DEFAULT_DEPTH, 1, 6)  # tried where none is asked for, the usual one first
AS_USUAL = Preference()
WORTH = 0.99  # another depth must save this much: the simulator is no better than that


@dataclass(frozen=True)
class Chosen:
    """A layout, what falls short of it, and what a step moves and takes.

    ``step_s`` leaves compute out where tokens are not known.
    """

    layout: Layout
    disk_bytes: int
    shortfalls: tuple[Shortfall, ...]
    link_bytes: Mapping[str, int]
    step_s: float | None
    simulated: Simulated | None
    preference: Preference = AS_USUAL


def choose_plan(
    parts: Partition,
    budgets: Budgets,
    needs: Needs,
    depth: int | None,
    rates: Rates | None,
    tokens: int = 0,
    profile: Profile | None = None,
    prefer: Preference | None = None,
) -> Chosen:
    """The layout of the least step time over a few prefetch depths, or over the one given.

    Compute counts as in ``profile``, else by FLOPs where ``tokens`` of a micro-step are given.
    A deeper prefetch takes memory from what could stay, so neither more nor less is always better.
    """
    best: Chosen | None = None
    needs = needs if prefer is None else replace(needs, prefer=prefer)
    for each in DEPTHS if depth is None and rates is not None else (depth,):
        candidate = _foresee(
            parts, budgets, replace(needs, prefetch_depth=each), rates, tokens, profile
        )
        if candidate.simulated is None:
            return candidate
        if best is None or _seconds(candidate) < WORTH * _seconds(best):
            best = candidate
    assert best is not None
    return best


def _seconds(chosen: Chosen) -> float:
    assert chosen.simulated is not None
    return chosen.simulated.stats.step_s


def _foresee(
    parts: Partition, budgets: Budgets, needs: Needs, rates: Rates | None, tokens: int,
    profile: Profile | None,
) -> Chosen:  # fmt: skip
    layout, disk, shortfalls = make_layout(parts, budgets, needs)
    if shortfalls:
        return Chosen(layout, disk, shortfalls, {}, None, None)
    coarse, known = coarsen(layout), rates or Rates()

    def run(costs: Costs) -> Simulated:
        return simulate(
            coarse, costs, micro_steps=needs.accumulate,
            update=needs.update,
        )  # fmt: skip

    costs = None
    if profile is not None and profile.forward_s:
        costs = Costs.from_profile(coarse, known, profile)
    elif tokens:
        costs = Costs.from_flops(coarse, known, tokens)
    if costs is not None:
        timed = run(costs)
        return Chosen(layout, disk, (), timed.link_bytes, timed.stats.step_s, timed)
    balanced = run(Costs.balanced(coarse, known))
    bare_s = run(Costs.from_flops(coarse, known, 0)).stats.step_s
    return Chosen(layout, disk, (), balanced.link_bytes, bare_s, balanced)
