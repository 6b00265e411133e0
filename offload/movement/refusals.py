"""Errors for requests that the machine refuses."""

from __future__ import annotations

from ..errors import BudgetError
from ..facts.tier import Tier
from ..schedule.layout import Layout
from ..schedule.messages import Kind, Refuse


def refusal(layout: Layout, refuse: Refuse) -> BudgetError:
    """Return the error for a request whose room no work in progress could free."""
    regions, tier, item = layout.regions, refuse.tier, refuse.item
    total = regions.device_bytes if tier is Tier.DEVICE else regions.host_bytes
    unit = item.kind is Kind.WEIGHTS
    if item.kind is Kind.SAVED:
        where = "" if refuse.unit < 0 else f" in unit {layout.units[refuse.unit].name!r}"
        named = "host" if tier is Tier.DEVICE and not layout.has_device else tier.value
        others = [repr(each) for each in ("auto", "recompute") if each != layout.saved.policy]
        remedy = (
            f"raise {named}_memory, use fewer tokens, or pass activations={' or '.join(others)}"
        )
        return BudgetError(
            f"what autograd keeps until backward (the activations){where}", named,
            refuse.need_bytes, refuse.have_bytes, refuse.have_bytes, remedy,
        )  # fmt: skip
    return BudgetError(
        f"unit {layout.units[item.number].name!r}" if unit else layout.name(item),
        tier.value, refuse.need_bytes, refuse.have_bytes, total,
        f"raise {tier.value}_memory, or free graphs that still hold weights",
    )  # fmt: skip
