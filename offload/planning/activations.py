"""Whether what autograd keeps until backward has room, under a policy and the budgets."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts.tier import Tier
from ..schedule.layout import Layout
from .plan import Budgets, Shortfall

WHAT = "what autograd keeps until backward (the activations)"


def left_bytes(layout: Layout, budgets: Budgets) -> int:
    """Of the budget of the memory that compute uses, what the engine's own things leave."""
    if budgets.device is None:
        return max(0, budgets.host - layout.regions.host_bytes)
    return max(0, budgets.device - layout.regions.device_bytes)


def shortfall(
    layout: Layout, budgets: Budgets, disk_bytes: int, sizes: Sequence[int], policy: str
) -> Shortfall | None:
    """What is missing where units keep ``sizes`` bytes each; ``None``: they fit.

    The last unit's stay where they are, since backward begins with them.  With ``"recompute"`` a
    unit keeps its inputs alone, but all of its own while it runs again.
    """
    here = left_bytes(layout, budgets)
    tier = Tier.HOST if budgets.device is None else Tier.DEVICE
    last = sizes[-1] if sizes else 0
    if policy == "recompute":
        inputs = sum(unit_input for unit_input in _inputs(layout, sizes))
        need, remedy = inputs + max(sizes, default=0), "give fewer tokens"
        have = here + layout.saved.host + layout.saved.disk
    elif policy == "keep" or (policy == "host" and budgets.device is None):
        need, have = sum(sizes), here
        remedy = "give fewer tokens, or activations='auto' or 'recompute'"
    elif policy == "host":
        need, have, tier = sum(sizes) - last, layout.saved.host, Tier.HOST
        remedy = "raise host_memory, give fewer tokens, or activations='auto' or 'recompute'"
    elif policy == "nvme":
        need, have, tier = sum(sizes) - last, layout.saved.disk, Tier.NVME
        remedy = "raise nvme_memory, give fewer tokens, or activations='recompute'"
    else:
        need, have = sum(sizes), here + layout.saved.host + layout.saved.disk
        remedy = "give fewer tokens, activations='recompute', or more memory of any tier"
    return None if need <= have else Shortfall(tier, WHAT, need, have, remedy)


def _inputs(layout: Layout, sizes: Sequence[int]) -> list[int]:
    """About what goes into each unit, by the shares that their shapes have of what they keep."""
    found = []
    for unit, size in zip(layout.units, sizes, strict=True):
        kept = unit.activation_bytes
        found.append(size * unit.input_bytes // kept if kept else size)
    return found
