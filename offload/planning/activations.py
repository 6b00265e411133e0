"""The check whether activations fit, for a policy and budgets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import format_bytes
from ..facts.tier import Tier
from ..schedule.layout import Layout
from .costs import inputs_of
from .plan import Budgets, Shortfall

LARGE_LOGITS = 0.1  # logits are named in the remedy above this share of the need
WHAT = "what autograd keeps until backward (the activations)"


def left_bytes(layout: Layout, budgets: Budgets) -> int:
    """Return the bytes that the engine leaves of the budget for the memory that compute uses."""
    if budgets.device is None:
        return max(0, budgets.host - layout.regions.host_bytes)
    return max(0, budgets.device - layout.regions.device_bytes)


def shortfall(
    layout: Layout, budgets: Budgets, sizes: Sequence[int], policy: str, may: Collection[int],
    logits_bytes: int = 0,
) -> Shortfall | None:  # fmt: skip
    """Return the shortfall for activations; ``None`` if they fit.

    The last unit's activations are not moved, since backward begins with them.  A recomputed unit
    keeps only its inputs, but all of its activations during the recomputation.

    Args:
        sizes: by unit, the bytes that autograd keeps.
        policy: see ``wrap``.
        may: the units that can be recomputed.
        logits_bytes: the bytes of logits, as a part of ``sizes``.
    """
    here = left_bytes(layout, budgets)
    tier = Tier.HOST if budgets.device is None else Tier.DEVICE
    largest = max(range(len(sizes)), key=lambda i: sizes[i], default=0)
    if sizes and sizes[largest] > here:
        what = f"what autograd keeps of unit {layout.units[largest].name!r} while it runs"
        return Shortfall(tier, what, sizes[largest], here, "use fewer tokens, or smaller units")
    last = sizes[-1] if sizes else 0
    if policy in ("auto", "recompute"):
        inputs = inputs_of(layout, sizes)
        least = (inputs[i] if i in may else size for i, size in enumerate(sizes))
        need = min(sum(sizes), sum(least) + max(sizes, default=0))
        have = here + layout.saved.host + layout.saved.disk
        remedy = "use fewer tokens, or more memory of any tier"
    elif policy == "keep" or (policy == "host" and budgets.device is None):
        need, have = sum(sizes), here
        remedy = "use fewer tokens, or activations='auto' or 'recompute'"
    elif policy == "host":
        need, have, tier = sum(sizes) - last, layout.saved.host, Tier.HOST
        remedy = "raise host_memory, use fewer tokens, or activations='auto' or 'recompute'"
    else:
        need, have, tier = sum(sizes) - last, layout.saved.disk, Tier.NVME
        remedy = "raise nvme_memory, use fewer tokens, or activations='recompute'"
    if need <= have:
        return None
    if logits_bytes > LARGE_LOGITS * need:
        remedy = (
            f"{format_bytes(logits_bytes)} are logits: compute the loss in chunks "
            f"(torch.nn.functional.linear_cross_entropy), or {remedy}"
        )
    return Shortfall(tier, WHAT, need, have, remedy)
