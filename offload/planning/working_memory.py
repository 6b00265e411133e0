"""Memory of a run that is not in its layout: of updates, of the reader of weight files, and where
activations are packed."""

from __future__ import annotations

from dataclasses import replace

from ..errors import format_bytes
from ..facts.tier import Tier
from ..io_engine.file_ranges import held_bytes, threads_for
from ..optim.activation_blocks import WINDOW_BYTES
from .choose import PlannedLayout
from .plan import Budgets, Needs, Shortfall

DIRECTIONS = 2  # of the link, each of which stages what is packed


def packing_bytes(itemsize: int) -> int:
    """Return the device memory in which activations are packed; see ``Accelerator.stage``."""
    return DIRECTIONS * WINDOW_BYTES if itemsize else 0


def device_working_bytes(needs: Needs) -> int:
    """Return the device memory of updates of whole parameters, and of packing activations."""
    return needs.device_update_bytes + packing_bytes(needs.packed_itemsize)


def working_bytes(budgets: Budgets, needs: Needs) -> int:
    """Return the host memory of the reader of weight files, if there is one, and of updates."""
    reader = held_bytes(threads_for(budgets.host)) if needs.in_place else 0
    return reader + needs.update_bytes


def for_layout(budgets: Budgets, needs: Needs) -> Budgets:
    """Return what budgets leave for the layout."""
    host = max(0, budgets.host - working_bytes(budgets, needs))
    if budgets.device is None:
        return replace(budgets, host=host)
    device = max(0, budgets.device - device_working_bytes(needs))
    return replace(budgets, host=host, device=device)


def of_budgets(planned: PlannedLayout, budgets: Budgets, needs: Needs) -> PlannedLayout:
    """Return a layout with shortfalls of whole budgets, not of what ``for_layout`` leaves."""

    def of_budget(short: Shortfall) -> Shortfall:
        beside, have = {
            Tier.HOST: (working_bytes(budgets, needs), budgets.host),
            Tier.DEVICE: (device_working_bytes(needs), budgets.device or 0),
        }.get(short.tier, (0, short.have_bytes))
        if not beside:
            return short
        on_device = short.tier is Tier.DEVICE
        updates = needs.device_update_bytes if on_device else needs.update_bytes
        uses = {
            "to update parameters": updates,
            "to read weight files": needs.in_place and not on_device,
            "to pack activations": needs.packed_itemsize and on_device,
        }
        why = " and ".join(use for use, needed in uses.items() if needed)
        what = (
            f"{short.what.removesuffix(',')}, with {format_bytes(beside)} of working memory {why},"
        )
        # The layout may have taken more from the budget, such as memory for unpacked weights.
        taken = max(beside, have - short.have_bytes)
        return replace(short, what=what, need_bytes=short.need_bytes + taken, have_bytes=have)

    return replace(planned, shortfalls=tuple(map(of_budget, planned.shortfalls)))
