"""What must hold after every signal, whatever the order of events.  Raises ``AssertionError``."""

from __future__ import annotations

from collections import Counter

from ..facts.tier import Tier
from .arena import Arena, Place
from .messages import Item, Kind, Read, Update, Write
from .residency import Residency
from .weights import Roles


def validate(machine: Residency) -> None:
    """Checks every invariant of the machine; about 10 us a unit, for tests and debugging."""
    _owners(machine)
    _currency(machine)
    _extents(machine)


def _owners(machine: Residency) -> None:
    """No slot has two owners; each lies in its region; regions account for exactly their slots."""
    weights, grads, updates = machine.weights, machine.gradients, machine.updates
    groups: list[tuple[Arena, list[Place]]] = [
        (weights.host_arena, []),
        (weights.device_arena, []),
        (grads.host_arena, []),
        (grads.device_arena, []),
        (updates.arena, []),
        (updates.visits, []),
    ]
    host_w, device_w, host_g, device_g, states, visits = (places for _, places in groups)
    for item in weights.units:
        host_w += [item.host.place] if item.host and not item.host.fixed else []
        device_w += [item.device.place] if item.device and not item.device.fixed else []
        copy = item.device if machine.layout.has_device else item.host
        forgotten = [place for place in item.kept if copy is None or copy.place != place]
        (device_w if machine.layout.has_device else host_w).extend(forgotten)
    for unit, home in zip(grads.units, machine.layout.homes, strict=True):
        if unit.slot is not None and home.grad_place is None:
            host_g.append(unit.slot)
        host_g += [unit.staging] if unit.staging else []
        device_g += [unit.device] if unit.device else []
    states += [state.slot for state in updates.states if state.slot is not None]
    visits += [w.visit for w in machine.in_flight if isinstance(w, Update) and w.visit]
    for arena, places in groups:
        end = arena.base
        for place in sorted(p for p in places if p.nbytes):
            assert place.tier is arena.tier, f"{place} lies in the wrong tier"
            assert place.offset >= end, f"{place} overlaps its neighbour, or leaves its region"
            end = place.offset + place.nbytes
        assert end <= arena.base + arena.nbytes, f"region of {arena.tier.value} memory is passed"
        used = sum(p.nbytes for p in places)
        assert used == arena.used_bytes, f"{arena.used_bytes} bytes accounted, {used} owned"


def _currency(machine: Residency) -> None:
    """Every unit has a current copy; nothing dirty can be evicted; counts are not negative."""
    for number, item in enumerate(machine.weights.units):
        home = machine.layout.homes[number]
        current = item.stored or home.weights is Tier.DEVICE
        current = current or (item.host is not None and item.host.valid)
        assert current, f"unit {number} has no current copy"
        assert item.pins >= 0, f"unit {number} was released too often"
        assert all(n > 0 for n in item.kept.values()), f"unit {number} keeps what was let go"
        for tier, copy in ((Tier.HOST, item.host), (Tier.DEVICE, item.device)):
            assert copy is None or copy.holds >= 0, f"unit {number} was let go too often"
            moved = copy is not None and not copy.fixed
            assert moved == (number in machine.weights.moved[tier]), f"unit {number} is miscounted"
        if not item.stored and home.weights is Tier.NVME:
            assert item.host is not None and item.host.holds > 0, f"unit {number} may be lost"
        if item.pins:
            copy = machine.weights.compute_copy(number)
            assert copy is not None, f"unit {number} is in use but not there"


def _extents(machine: Residency) -> None:
    """One writer per extent, none on a committed one, and no read beside a write of its item."""
    writes = Counter(w.item for w in machine.in_flight if isinstance(w, Write))
    for work, count in machine.in_flight.items():
        if isinstance(work, Write):
            assert count == 1 and writes[work.item] == 1, f"two writers of {work.item}"
            roles = _roles(machine, work.item)
            if roles is not None and roles.pair:
                assert work.role != roles.committed, f"{work.item} overwrites its committed extent"
        elif isinstance(work, Read):
            assert not writes[work.item], f"{work.item} is read while it is written"


def _roles(machine: Residency, item: Item) -> Roles | None:
    if item.kind is Kind.WEIGHTS:
        return machine.weights.units[item.number].roles
    if item.kind is Kind.STATE:
        return machine.updates.states[item.number].roles
    return None
