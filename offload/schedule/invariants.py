"""The invariants of the residency machine, which hold after every signal in any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..facts.tier import Tier
from .arena import Place
from .items import Copy, Item, Items
from .messages import Read, Work, Write
from .residency import Residency
from .weights import UnitWeights


def validate(machine: Residency) -> None:
    """Check every invariant of the machine, for tests and debugging; takes about 10 us per unit.

    Raises:
        AssertionError: an invariant does not hold.
    """
    forgotten = [
        place
        for item in machine.weights.units
        for place in item.kept
        if (copy := machine.weights.compute_copy(item.key.number)) is None or copy.place != place
    ]
    validate_items(machine.items, machine.in_flight, forgotten)
    for unit in machine.weights.units:
        _weights(machine, unit)


def validate_items(
    items: Items, in_flight: Mapping[Work, int], forgotten: list[Place] | None = None
) -> None:
    """Check the invariants for items of every kind.

    Args:
        forgotten: slots still in use whose copies were forgotten; see ``Items.forget``.
    """
    _owners(items, forgotten or [])
    _extents(items, in_flight)
    for item in items.all():
        for tier in (Tier.DEVICE, Tier.HOST):
            if (copy := item.copy(tier)) is not None:
                _copy(item, tier, copy)


def _owners(items: Items, forgotten: list[Place]) -> None:
    """Check that no slot has two owners, that slots are in their regions, and that regions account
    for exactly their slots."""
    for region, (arena, tenants) in items.regions().items():
        slots = [copy.slot for item in tenants if (copy := item.copy(region.tier)) is not None]
        assert len(slots) == len(tenants), f"a tenant of {region} has no copy there"
        first, last = region.base, region.base + region.nbytes
        slots += [
            p for p in forgotten if p.tier is region.tier and first <= p.offset < last and p.nbytes
        ]
        end = first
        for slot in sorted(s for s in slots if s.nbytes):
            assert slot.tier is region.tier, f"{slot} lies in the wrong tier"
            assert slot.offset >= end, f"{slot} overlaps its neighbour, or leaves its region"
            end = slot.offset + slot.nbytes
        passed = end > last and not arena.counts_only
        assert not passed, f"region of {region.tier.value} memory is passed"
        used = sum(s.nbytes for s in slots)
        assert used == arena.used_bytes, f"{arena.used_bytes} bytes accounted, {used} owned"
    tenants_of = dict(items.regions().values())
    for item in items.all():
        for tier in (Tier.DEVICE, Tier.HOST):
            copy = item.copy(tier)
            moved = copy is not None and not copy.fixed
            listed = moved and item in tenants_of[items.arena(item.key.kind, tier)]
            assert moved == listed, f"{item.key} is miscounted"


def _copy(item: Item, tier: Tier, copy: Copy) -> None:
    assert copy.holds >= 0, f"{item.key} was let go too often"
    begins = copy.fixed or (copy.place.tier is tier and copy.place.offset == copy.slot.offset)
    assert begins and copy.place.nbytes <= copy.slot.nbytes, f"{item.key} lies beside its slot"


def _extents(items: Items, in_flight: Mapping[Work, int]) -> None:
    """Check that each extent has one writer, that no write targets a committed extent, and that no
    item is read while it is written."""
    writes = Counter(w.item for w in in_flight if isinstance(w, Write))
    for work, count in in_flight.items():
        if isinstance(work, Write):
            assert count == 1 and writes[work.item] == 1, f"two writers of {work.item}"
            roles = items.of(work.item).roles
            if roles.pair:
                assert work.role != roles.committed, f"{work.item} overwrites its committed extent"
        elif isinstance(work, Read):
            assert not writes[work.item], f"{work.item} is read while it is written"


def _weights(machine: Residency, item: UnitWeights) -> None:
    """Check that a unit has a current copy, that dirty data cannot be evicted, and its counts."""
    unit, home = item.key.number, machine.layout.homes[item.key.number]
    current = item.stored or home.weights is Tier.DEVICE
    current = current or (item.host is not None and item.host.valid)
    assert current, f"unit {unit} has no current copy"
    assert item.pins >= 0, f"unit {unit} was released too often"
    soonest = machine.weights.next_use(item, Tier.HOST)
    assert soonest >= 0, f"unit {unit} counts as used before now, and gives way to nobody"
    assert all(item.kept.values()), f"unit {unit} keeps what was let go"
    if not item.stored and home.weights is Tier.NVME:
        assert item.host is not None and item.host.holds > 0, f"unit {unit} may be lost"
    if item.pins:
        assert machine.weights.compute_copy(unit) is not None, f"unit {unit} is used, not there"
