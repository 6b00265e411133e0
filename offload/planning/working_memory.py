"""Memory of a run that is not in its layout: of updates, and of the reader of weight files."""

from __future__ import annotations

from dataclasses import replace

from ..errors import format_bytes
from ..facts.tier import Tier
from ..io_engine.ranges import held_bytes, threads_for
from .choose import PlannedLayout
from .plan import Budgets, Needs, Shortfall


def working_bytes(budgets: Budgets, needs: Needs) -> int:
    """Return the host memory of the reader of weight files, if there is one, and of updates."""
    reader = held_bytes(threads_for(budgets.host)) if needs.in_place else 0
    return reader + needs.update_bytes


def for_layout(budgets: Budgets, needs: Needs) -> Budgets:
    """Return what budgets leave for the layout."""
    host = max(0, budgets.host - working_bytes(budgets, needs))
    if budgets.device is None:
        return replace(budgets, host=host)
    return replace(budgets, host=host, device=max(0, budgets.device - needs.device_update_bytes))


def of_budgets(planned: PlannedLayout, budgets: Budgets, needs: Needs) -> PlannedLayout:
    """Return a layout with shortfalls of whole budgets, not of what ``for_layout`` leaves."""

    def of_budget(short: Shortfall) -> Shortfall:
        beside, have = {
            Tier.HOST: (working_bytes(budgets, needs), budgets.host),
            Tier.DEVICE: (needs.device_update_bytes, budgets.device or 0),
        }.get(short.tier, (0, short.have_bytes))
        if not beside:
            return short
        work = "to update parameters" if needs.update_bytes or short.tier is Tier.DEVICE else ""
        read = "to read weight files" if needs.in_place and short.tier is Tier.HOST else ""
        why = " and ".join(filter(None, (work, read)))
        what = (
            f"{short.what.removesuffix(',')}, with {format_bytes(beside)} of working memory {why},"
        )
        # The layout may have taken more from the budget, such as memory for unpacked weights.
        taken = max(beside, have - short.have_bytes)
        return replace(short, what=what, need_bytes=short.need_bytes + taken, have_bytes=have)

    return replace(planned, shortfalls=tuple(map(of_budget, planned.shortfalls)))
