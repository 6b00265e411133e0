"""The check whether a layout and its activations fit, and the budgets that would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..errors import format_bytes
from ..facts.tier import Tier
from ..schedule.layout import Layout
from .choose import PlannedLayout
from .costs import inputs_of
from .partition import Partition
from .plan import Budgets, Needs, Shortfall
from .planner import make_layout
from .working_memory import for_layout, working_bytes

FITTING_TRIES = 10  # attempts: raising one budget can change what another tier needs
LARGE_LOGITS = 0.1  # logits are named in the remedy above this share of the need
WHAT = "what autograd keeps until backward (the activations)"


def left_bytes(layout: Layout, budgets: Budgets) -> int:
    """Return the bytes that the engine leaves of the budget for the memory that compute uses."""
    if budgets.device is None:
        return max(0, budgets.host - layout.regions.counted_host_bytes)
    return max(0, budgets.device - layout.regions.device_bytes)


def shortfall(
    layout: Layout, budgets: Budgets, sizes: Sequence[int], policy: str, may: Collection[int],
    logits_bytes: int = 0, *, could_tile: bool = False,
) -> Shortfall | None:  # fmt: skip
    """Return the shortfall for activations; ``None`` if they fit.

    The last unit's activations are not moved, since backward begins with them.  A recomputed unit
    keeps only its inputs, but all of its activations during the recomputation.

    Args:
        sizes: by unit, the bytes that autograd keeps.
        policy: see ``wrap``.
        may: the units that can be recomputed.
        logits_bytes: the bytes of logits, as a part of ``sizes``.
        could_tile: whether feed-forward layers could run in tiles, and do not.
    """
    here, saved = left_bytes(layout, budgets), layout.saved
    tier = Tier.HOST if budgets.device is None else Tier.DEVICE
    whole = budgets.host if budgets.device is None else budgets.device
    largest = max(range(len(sizes)), key=lambda i: sizes[i], default=0)
    if sizes and sizes[largest] > here:
        what = f"what autograd keeps of unit {layout.units[largest].name!r} while it runs"
        remedy = "use fewer tokens, or smaller units"
        if logits_bytes and layout.units[largest].logits_bytes:
            remedy = "pass loss='chunked', or use fewer tokens"
        elif could_tile:
            remedy = "pass tile='auto', use fewer tokens, or smaller units"
        return Shortfall(tier, what, sizes[largest], here, remedy, whole)
    last = sizes[-1] if sizes else 0
    if policy in ("auto", "recompute", "selective"):
        inputs = inputs_of(layout, sizes)
        least = (inputs[i] if i in may else size for i, size in enumerate(sizes))
        beyond = max(0, sum(sizes) - here)
        whole_bytes = sum(sizes) - beyond + saved.below_bytes(beyond)
        need = min(whole_bytes, sum(least) + max(sizes, default=0))
        have = here + saved.host + saved.disk
        remedy = "use fewer tokens, or more memory of any tier"
    elif policy == "keep" or (policy == "host" and budgets.device is None):
        need, have = sum(sizes), here
        remedy = "use fewer tokens, or activations='auto' or 'recompute'"
    elif policy == "host":
        need, have, tier = saved.below_bytes(sum(sizes) - last), saved.host, Tier.HOST
        remedy = "raise host_memory, use fewer tokens, or activations='auto' or 'recompute'"
    else:
        need, have, tier = saved.below_bytes(sum(sizes) - last), saved.disk, Tier.NVME
        remedy = "raise nvme_memory, use fewer tokens, or activations='recompute'"
    if need <= have:
        return None
    if logits_bytes > LARGE_LOGITS * need:
        remedy = (
            f"{format_bytes(logits_bytes)} are logits, which loss='chunked' avoids: pass it, "
            f"or {remedy}"
        )
    return Shortfall(tier, WHAT, need, have, remedy)


def short_for_activations(
    planned: PlannedLayout, needs: Needs, budgets: Budgets, logits_bytes: int
) -> Shortfall | None:
    """Return the shortfall for activations of a layout that fits; ``None`` if there is none."""
    if planned.shortfalls or needs.saved_bytes is None:
        return None
    return shortfall(
        planned.layout, for_layout(budgets, needs), needs.saved_bytes, needs.activations,
        needs.recomputable, logits_bytes, could_tile=needs.could_tile,
    )  # fmt: skip


def choose_side(
    with_updates: Callable[[bool], Needs], choose: Callable[[Needs], PlannedLayout],
    budgets: Budgets, logits_bytes: int,
) -> tuple[Needs, PlannedLayout]:  # fmt: skip
    """Return needs and layout with updates of matrices on the device, or if it has no room for
    them, on the CPU."""
    needs = with_updates(budgets.device is not None)
    chosen = choose(needs)
    if needs.matrices_visit and (missing := _short_tiers(chosen, needs, budgets, logits_bytes)):
        other = choose(on_cpu := with_updates(False))
        if len(_short_tiers(other, on_cpu, budgets, logits_bytes)) < len(missing):
            return on_cpu, other
    return needs, chosen


def _short_tiers(
    planned: PlannedLayout, needs: Needs, budgets: Budgets, logits_bytes: int
) -> set[Tier]:
    """Return the tiers that are too small for a layout, or for its activations."""
    found = {each.tier for each in planned.shortfalls}
    short = short_for_activations(planned, needs, budgets, logits_bytes)
    return found if short is None else {short.tier}


def copied_if_better(
    chosen: PlannedLayout, needs: Needs, choose: Callable[[Needs], PlannedLayout]
) -> PlannedLayout:
    """Return a layout with copies of weights if the reader of weight files does not fit."""
    if not chosen.shortfalls:
        return chosen
    copied, most = choose(replace(needs, in_place=frozenset())), _missing(chosen)
    fits = all(nbytes <= most[tier] for tier, nbytes in _missing(copied).items())
    return copied if fits else chosen


def _missing(planned: PlannedLayout) -> Counter[Tier]:
    missing = Counter[Tier]()
    for each in planned.shortfalls:
        missing[each.tier] += each.missing_bytes
    return missing


def fitting_budgets(
    needs: Needs, parts: Partition, given: Budgets, logits_bytes: int
) -> dict[str, str]:
    """Return budgets that would fit, by option; see ``PlanDetail.fitting``."""
    budgets = replace(given, host=max(given.host, working_bytes(given, needs)))
    for _ in range(FITTING_TRIES):
        room = for_layout(budgets, needs)  # a reader has more threads if there is more host memory
        layout, _, missing = make_layout(parts, room, needs)
        if not missing and needs.saved_bytes is not None:
            short = shortfall(
                layout, for_layout(budgets, needs), needs.saved_bytes, needs.activations,
                needs.recomputable, logits_bytes, could_tile=needs.could_tile,
            )  # fmt: skip
            missing = () if short is None else (short,)
        if not missing:
            return budgets.beyond(given)
        budgets = budgets.raised(missing)
    return {}
