"""The choice among layouts, by simulated step time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..facts.rates import Rates
from ..schedule.layout import Layout
from ..schedule.units import Unit
from .bounds import device_update_worth, least_seconds
from .coarse import coarsen, with_larger_parts
from .costs import Costs, Profile, inputs_of
from .partition import Partition
from .placement import DEFAULT_DEPTH
from .plan import Budgets, Needs, Preference, Shortfall
from .planner import make_layout
from .recompute_choice import NOTHING, Recomputed, choose_recompute
from .steady import MOST_STEPS, Simulated, simulate

DEPTHS = (DEFAULT_DEPTH, 1, 6)  # tried if the caller sets none; the default first
AS_USUAL = Preference()
OTHERS = (
    Preference(("weights", "state", "gradients")),
    Preference(("state", "weights", "gradients")),
)
DEVICE_SHARES = (1.0, 0.5)  # of the room on the device, for units that are updated there
VISITING_SHARES = (1.0, 0.5)  # of the share that is worthwhile if the link is otherwise idle
LEAST_VISITING = 0.02  # a smaller share is not worth its slots
SMALLER_SHARE = 0.8  # of the room for homes, which leaves more for staging
CHOOSING_SUBGROUPS = 100  # coarser, shorter simulations are faster and rank layouts as well
CHOOSING_STEPS = 6
RECOMPUTING_STEPS = 2  # one to record uses, one to measure: activations live within a step
WORTH = 0.99  # a choice must be faster than this share of the best: the simulator's accuracy
HOPELESS = 1.1  # times what would be chosen: a slower simulated step ends its simulation
# Updates of adapters on the device may be a little slower by this simulator, which does not count
# that they need no CPU, and that compute never waits for them.
NO_SLOWER = 1.005
# Updates on the device of state from host memory must save 15 %.  On an H200, the simulator
# predicted 0.89 and 0.95 of the time without them, but 1.07 and 1.10 were measured; 0.83, predicted
# with little compute, was 1.14 with twice the compute.  CPU updates share memory bandwidth with the
# copies, and the thread that launches compute shares the driver with them.  So these updates are
# simulated with more compute than the other choices.
VISITS_WORTH = 0.85
VISITS_COMPUTE = 1.5  # factor for the compute of the other choices


@dataclass(frozen=True)
class PlannedLayout:
    """A layout, its shortfalls, and what a step moves and takes.

    Attributes:
        disk_bytes: size of the store.
        link_bytes: by lane, bytes that a step moves.
        step_s: predicted time of a step; without compute if neither tokens nor a profile are known.
        simulated: the simulated steps; ``None`` if there are shortfalls.
        needs: the needs with the chosen depth and preference.
    """

    layout: Layout
    disk_bytes: int
    shortfalls: tuple[Shortfall, ...]
    link_bytes: Mapping[str, int]
    step_s: float | None
    simulated: Simulated | None
    needs: Needs


@dataclass(frozen=True)
class Workload:
    """The compute of a micro-step: a number of tokens, or what an example step measured.

    Attributes:
        logits: whether the loss is computed from all logits at once.
        received: by unit, the bytes that arrive from other ranks; see ``received_bytes``.
    """

    tokens: int = 0
    profile: Profile | None = None
    logits: bool = True
    received: Sequence[tuple[int, int]] = ()

    @property
    def wire_bytes(self) -> int:
        """The bytes that arrive from other ranks."""
        return sum(map(sum, self.received))

    def costs(self, layout: Layout, rates: Rates) -> Costs | None:
        """Return the costs of a micro-step; ``None`` if nothing is known of it."""
        saved = self.saved_bytes(layout.units)
        if self.profile is not None and self.profile.forward_s:
            costs = Costs.from_profile(layout, rates, self.profile)
        elif self.tokens:
            costs = Costs.from_flops(layout, rates, self.tokens)
        else:
            return None
        costs = costs.waiting_for(self.received)
        return costs if saved is None else costs.keeping(saved, inputs_of(layout, saved))

    def saved_bytes(self, units: Sequence[Unit]) -> list[int] | None:
        """Return by unit the bytes that autograd would keep of a micro-step, as measured or by
        shapes; ``None`` if neither is known.  Bytes outside all units count with the last one."""
        if self.profile is not None:
            known = dict(self.profile.activation_bytes)
            found = [known.pop(unit.name, 0) for unit in units]
            found[-1] += sum(known.values())
            return found
        if not self.tokens:
            return None
        logits = self.logits
        return [
            self.tokens * (unit.activation_bytes + (unit.logits_bytes if logits else 0))
            for unit in units
        ]

    def logits_bytes(self, units: Sequence[Unit]) -> int:
        """Return the bytes of the logits and of the loss over them, as far as shapes show them."""
        return self.tokens * sum(unit.logits_bytes for unit in units) if self.logits else 0


def choose_layout(
    parts: Partition,
    budgets: Budgets,
    needs: Needs,
    depth: int | None,
    rates: Rates | None,
    load: Workload | None = None,
    prefer: Preference | None = None,
) -> PlannedLayout:
    """Return the layout with the least simulated time over a few prefetch depths and placements.

    A deeper prefetch and more room for staging are not always better, since they take memory from
    homes.  While choosing, compute is assumed to take as long as the slowest of the default
    placement's moves (longer for updates on the device of state from host memory).  So the choice
    is the same before a run, when the load is known, and in it, when it is not.

    Args:
        depth: the prefetch depth; ``None``: choose it.
        prefer: the placement; ``None``: choose it.
    """
    load = load or Workload()
    best = _best_needs(parts, budgets, needs, depth, rates, prefer)
    if rates is not None and prefer is None:
        layout, _, shortfalls = make_layout(parts, budgets, best)
        costs = load.costs(layout, rates)
        if not shortfalls and costs is not None and needs.activations == "auto":
            again = recomputing(layout, costs, best)
            prefer = replace(
                best.prefer, recompute=again.units, keep_attention=again.keep_attention
            )
            best = replace(best, prefer=prefer)
    return plan_layout(parts, budgets, best, rates, load)


def layout_with_room(
    parts: Partition,
    budgets: Budgets,
    needs: Needs,
    depth: int | None,
    prefer: Preference | None,
    has_room: Callable[[PlannedLayout], bool],
) -> PlannedLayout:
    """Return the usual layout, or if it has no room for activations, the first one that has.

    No steps are simulated. The placements of ``choose_layout`` are tried one at a time, except
    updates on the device of state from host memory, with the usual and the smallest depth. If none
    has room, the usual layout is returned.
    """
    preferences = [prefer or AS_USUAL]
    if prefer is None and budgets.nvme is not None:
        preferences += [*OTHERS, Preference(share=SMALLER_SHARE)]
    if prefer is None and budgets.device is not None:
        preferences += [Preference(beside=True), *(Preference(device=x) for x in DEVICE_SHARES)]
    depths = (DEFAULT_DEPTH, min(DEPTHS)) if depth is None else (depth,)

    def layouts() -> Iterator[PlannedLayout]:
        for tried, ahead in itertools.product(preferences, depths):
            made = replace(needs, prefetch_depth=ahead, prefer=tried)
            layout, disk, shortfalls = make_layout(parts, budgets, made)
            yield PlannedLayout(layout, disk, shortfalls, {}, None, None, made)

    others = layouts()
    usual = next(others)
    if usual.shortfalls or has_room(usual):
        return usual
    return next((each for each in others if not each.shortfalls and has_room(each)), usual)


def _best_needs(
    parts: Partition,
    budgets: Budgets,
    needs: Needs,
    depth: int | None,
    rates: Rates | None,
    prefer: Preference | None,
) -> Needs:
    """Return ``needs`` with the depth and the preference of the best layout."""
    fixed = replace(needs, prefetch_depth=depth, prefer=prefer or AS_USUAL)
    if rates is None or (depth is not None and prefer is not None):
        return fixed
    usual, _, shortfalls = make_layout(parts, budgets, fixed)
    if shortfalls:
        return fixed
    compute_s = least_seconds(usual, rates)
    best, best_s = fixed, math.inf
    seen: list[tuple[object, ...]] = []
    times: list[float] = []

    def try_out(tried: Needs, worth: float = WORTH) -> None:
        nonlocal best, best_s
        if compute_s * needs.accumulate >= worth * best_s:
            return  # compute alone takes too long for it to be chosen
        layout, _, shortfalls = make_layout(parts, budgets, tried)
        placed = layout.homes, layout.regions, layout.prefetch_depth, layout.visiting
        if shortfalls or placed in seen:
            return
        seen.append(placed)
        seconds = balanced_s(layout, tried, rates, compute_s, HOPELESS * worth * best_s)
        times.append(seconds)
        if seconds < worth * best_s:
            best, best_s = tried, seconds

    for each in DEPTHS if depth is None else (depth,):
        if len(times) == 2 and math.isclose(*times, rel_tol=1e-3):
            break  # weights are not what steps wait for
        try_out(replace(fixed, prefetch_depth=each))
    if prefer is None and budgets.nvme is not None:
        for other in OTHERS:
            try_out(replace(best, prefer=other))
        try_out(replace(best, prefer=replace(best.prefer, share=SMALLER_SHARE)))
    if prefer is None and budgets.device is not None:
        try_out(replace(best, prefer=replace(best.prefer, beside=True)), NO_SLOWER)
        for share in DEVICE_SHARES:
            try_out(replace(best, prefer=replace(best.prefer, device=share)))
        paying = device_update_worth(rates) or 0.0
        device_updates = [
            share * paying for share in VISITING_SHARES if share * paying > LEAST_VISITING
        ]
        if device_updates:
            compute_s *= VISITS_COMPUTE
            best_s = balanced_s(make_layout(parts, budgets, best)[0], best, rates, compute_s)
        for visiting in device_updates:
            worth = WORTH if best.prefer.visiting else VISITS_WORTH
            try_out(replace(best, prefer=replace(best.prefer, visiting=visiting)), worth)
    return best


def recomputing(
    layout: Layout, costs: Costs, needs: Needs, now: Recomputed = NOTHING
) -> Recomputed:
    """Return the units that should recompute their forward, out of ``needs.recomputable``.

    Returns ``now``, the present choice, unless another one is better.  Returns no units if it is
    not known what autograd keeps.
    """
    if not costs.saved_bytes:
        return NOTHING

    def seconds(tried: Layout) -> tuple[bool, float]:
        found = run_steps(tried, costs, needs, RECOMPUTING_STEPS)
        return found.step.overflows, found.step_s

    coarse = with_larger_parts(coarsen(layout, CHOOSING_SUBGROUPS), costs.saved_bytes)
    return choose_recompute(coarse, costs, needs.recomputable, seconds, now)


def balanced_s(
    layout: Layout, needs: Needs, rates: Rates, compute_s: float, hopeless_s: float = math.inf
) -> float:
    """Return the seconds of a step whose micro-steps compute for ``compute_s`` each; if they are
    more than ``hopeless_s``, those of some step."""
    coarse = coarsen(layout, CHOOSING_SUBGROUPS)
    costs = Costs.balanced(coarse, rates, compute_s)
    return run_steps(coarse, costs, needs, CHOOSING_STEPS, hopeless_s).step_s


def plan_layout(
    parts: Partition, budgets: Budgets, needs: Needs, rates: Rates | None, load: Workload
) -> PlannedLayout:
    """Return the layout for ``needs``, with a simulated step."""
    layout, disk, shortfalls = make_layout(parts, budgets, needs)
    if shortfalls:
        return PlannedLayout(layout, disk, shortfalls, {}, None, None, needs)
    coarse, known = coarsen(layout), rates or Rates()
    costs = load.costs(coarse, known)
    if costs is not None:
        timed = run_steps(with_larger_parts(coarse, costs.saved_bytes), costs, needs)
        return PlannedLayout(layout, disk, (), timed.link_bytes, timed.step_s, timed.step, needs)
    balanced = run_steps(coarse, Costs.balanced(coarse, known), needs)
    bare_s = run_steps(coarse, Costs.from_flops(coarse, known, 0), needs).step_s
    return PlannedLayout(layout, disk, (), balanced.link_bytes, bare_s, balanced.step, needs)


@dataclass(frozen=True)
class Steps:
    """An average step.

    Attributes:
        step_s: seconds, with a share of the cost of a commit.
        link_bytes: bytes moved, by lane.
        step: the simulated steps without commits, unless every step commits.
    """

    step_s: float
    link_bytes: Mapping[str, int]
    step: Simulated


def run_steps(
    layout: Layout, costs: Costs, needs: Needs, most_steps: int = MOST_STEPS,
    hopeless_s: float = math.inf,
) -> Steps:  # fmt: skip
    """Simulate steps with commits as often as ``needs`` says.  For ``hopeless_s`` see ``simulate``.

    Commits that are not in every step are not simulated one by one: a step is charged the average
    share of the cost that commits have in every step.
    """

    def run(commit: bool) -> Simulated:
        return simulate(
            layout, costs, micro_steps=needs.accumulate, update=needs.update, commit=commit,
            most_steps=most_steps, hopeless_s=hopeless_s,
        )  # fmt: skip

    most = run(needs.commit_every == 1)
    step_s, links = most.stats.step_s, most.link_bytes
    if needs.commit_every > 1 and step_s < hopeless_s:
        every = run(True)
        step_s += (every.stats.step_s - step_s) / needs.commit_every
        links = {
            lane: nbytes + (every.link_bytes[lane] - nbytes) // needs.commit_every
            for lane, nbytes in links.items()
        }
    return Steps(step_s, links, most)
