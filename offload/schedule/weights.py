"""The weights of every unit: which copies exist, which is current, and who may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..facts.tier import Tier
from .arena import Arena, Place
from .layout import Layout
from .messages import CopyIn, Item, Kind, Read, Work, Write
from .order import NEVER, Order, Use


class Roles:
    """The committed extent of an item, and the ``newest``, which is what a read must see.

    -1: none, it reads as zeroes.  A write never targets the committed extent.  Without durability
    there is one extent, and none is ever committed.
    """

    __slots__ = ("committed", "newest", "pair")

    def __init__(self, pair: bool) -> None:
        self.pair, self.committed, self.newest = pair, -1, -1

    @property
    def written(self) -> bool:
        """Whether there is anything to read."""
        return self.newest >= 0

    def target(self) -> int:
        """The extent that the next write goes to."""
        return 1 if self.pair and self.committed == 0 else 0

    def wrote(self) -> None:
        self.newest = self.target()


@dataclass
class Copy:
    """A copy of a unit's weights in a memory tier.

    ``valid`` once it has arrived; ``holds`` counts what still reads or writes it.
    """

    place: Place
    valid: bool
    fixed: bool
    holds: int = 0


class _Unit:
    """The copies of one unit's weights.

    ``pins`` counts compute's uses of the compute-tier copy.  ``kept`` counts, for each slot, the
    storages that graphs keep over it after compute let go: the copy's own slot, and those of copies
    that are forgotten, which only such storages still use.
    ``stored`` says that the newest extent is current, ``updating`` that an update is queued: until
    it is done nobody computes with the unit.
    """

    __slots__ = (
        "device", "host", "kept", "nbytes", "pins", "roles", "stored", "turn", "updating"
    )  # fmt: skip

    def __init__(self, nbytes: int, pair: bool) -> None:
        self.nbytes = nbytes
        self.host: Copy | None = None
        self.device: Copy | None = None
        self.kept: dict[Place, int] = {}
        self.pins = self.turn = 0
        self.stored = self.updating = False
        self.roles = Roles(pair)


class Weights:
    """Moves weights between the tiers by emitting instructions; evicts by the next known use."""

    def __init__(self, layout: Layout, order: Order, emit: Callable[[Work], None]) -> None:
        self.layout, self.order, self._emit = layout, order, emit
        regions = layout.regions
        self.host_arena = Arena(Tier.HOST, regions.host_fixed, regions.host_weights)
        self.device_arena = Arena(Tier.DEVICE, regions.device_fixed, regions.device_weights)
        self.updates_begun = self.updates_done = 0
        self.drains = False  # whether all queued updates come before any further compute
        self.updating: set[int] = set()
        self.units: list[_Unit] = []
        self.moved: dict[Tier, set[int]] = {Tier.HOST: set(), Tier.DEVICE: set()}  # not fixed there
        self._users = [
            [u.index, *(other.index for other in layout.units if u.index in other.shares)]
            for u in layout.units
        ]
        for unit, home in zip(layout.units, layout.homes, strict=True):
            item = _Unit(unit.weight_bytes, layout.durable)
            if home.host_place is not None:
                item.host = Copy(home.host_place, valid=True, fixed=True)
            if home.device_place is not None:
                item.device = Copy(home.device_place, valid=True, fixed=True)
            if home.weights is Tier.NVME:
                item.stored, item.roles.newest = True, 0
            self.units.append(item)

    # -- questions ------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Queued updates that come before any use that the recorded order foresees."""
        return self.updates_begun - self.updates_done if self.drains else 0

    @property
    def compute_arena(self) -> Arena:
        """Where the copies that compute uses come and go."""
        return self.device_arena if self.layout.has_device else self.host_arena

    def compute_copy(self, unit: int) -> Copy | None:
        """The copy that compute uses."""
        item = self.units[unit]
        return item.device if self.layout.has_device else item.host

    def _on_device(self, unit: int) -> bool:
        copy = self.units[unit].device
        return copy is not None and copy.valid

    def usable(self, unit: int) -> bool:
        """Whether compute may be told to go on (on a device, its stream waits for the copy)."""
        copy = self.compute_copy(unit)
        if copy is None or self.units[unit].updating:
            return False
        return self.layout.has_device or copy.valid

    def host_valid(self, unit: int) -> bool:
        """Whether the update can use a host copy now."""
        host = self.units[unit].host
        return host is not None and host.valid

    # -- toward compute -------------------------------------------------------------------------

    def toward_compute(self, unit: int, distance: int, spare: Iterable[int] = ()) -> bool:
        """Brings a unit closer to compute.  ``False``: there is no room at this distance.

        ``distance`` is how many uses away the unit is (-1: now); only copies that are used later
        give way.  ``spare`` names units that must not.
        """
        if not self.layout.has_device:
            return self.toward_host(unit, distance, spare)
        item = self.units[unit]
        if item.device is not None or item.updating:
            return True
        if not self.host_valid(unit):
            return self.toward_host(unit, distance, spare)
        place = self._room(self.device_arena, item.nbytes, distance, spare)
        if place is None:
            return False
        item.device = Copy(place, valid=False, fixed=False)
        self.moved[Tier.DEVICE].add(unit)
        self._copy_in(unit, item)
        return True

    def toward_host(self, unit: int, distance: int, spare: Iterable[int] = ()) -> bool:
        """Starts to read a unit into host memory, where it is not there or on its way already."""
        item = self.units[unit]
        if item.host is not None:
            return True
        place = self._room(self.host_arena, item.nbytes, distance, spare)
        if place is None:
            return False
        assert item.stored, f"unit {unit} has no current copy to read"
        item.host = Copy(place, valid=False, fixed=False, holds=1)
        self.moved[Tier.HOST].add(unit)
        self._emit(Read(Item(Kind.WEIGHTS, unit), item.roles.newest, place, urgent=distance < 0))
        return True

    def _copy_in(self, unit: int, item: _Unit) -> None:
        assert item.host is not None and item.device is not None
        item.host.holds += 1
        item.device.valid = False
        item.device.holds += 1
        self._emit(CopyIn(unit, item.host.place, item.device.place))

    # -- room -----------------------------------------------------------------------------------

    def evictable(self, unit: int, tier: Tier) -> Copy | None:
        """The unit's copy in ``tier`` if it may be dropped: clean, arrived, unused, not fixed."""
        item = self.units[unit]
        copy = item.device if tier is Tier.DEVICE else item.host
        if copy is None or copy.fixed or not copy.valid or copy.holds:
            return None
        if tier is self.layout.compute_tier and (item.pins or copy.place in item.kept):
            return None
        if tier is Tier.HOST and not item.stored:
            return None
        return copy

    def _next_use(self, unit: int, tier: Tier) -> int:
        compute = min(self.order.next_use(Use.COMPUTE, user) for user in self._users[unit])
        update = self.order.next_use(Use.UPDATE, unit)
        if tier is Tier.DEVICE:
            return compute + self.queued if compute < update else NEVER
        item = self.units[unit]
        if item.updating:  # it is used when its turn in the queue comes
            return max(0, item.turn - self.updates_done)  # others may have been let before it
        return min(compute, update) + self.queued

    def _room(self, arena: Arena, nbytes: int, distance: int, spare: Iterable[int]) -> Place | None:
        place = arena.allocate(nbytes)
        if place is not None:
            return place
        keep = set(spare)
        if arena.tier is not self.layout.compute_tier:  # on the device already: here it may go
            keep = {u for u in keep if self.units[u].updating or not self._on_device(u)}
        victims: list[tuple[int, int, Copy]] = []
        for unit in self.moved[arena.tier]:
            copy = self.evictable(unit, arena.tier)
            if copy is not None and unit not in keep and copy.place.nbytes:
                use = self._next_use(unit, arena.tier)
                if use > distance:
                    victims.append((use, unit, copy))
        if not arena.fits_after(nbytes, [copy.place for _, _, copy in victims]):
            return None
        victims.sort(key=lambda victim: (-victim[0], victim[1]))
        for _, unit, _ in victims:
            self.drop(unit, arena.tier)
            place = arena.allocate(nbytes)
            if place is not None:
                return place
        raise AssertionError("an arena that would fit after all evictions did not")

    def drop(self, unit: int, tier: Tier) -> None:
        """Forgets a clean copy and frees its slot."""
        item = self.units[unit]
        copy = self.evictable(unit, tier)
        assert copy is not None, f"unit {unit} must not be evicted from {tier.value}"
        self.moved[tier].discard(unit)
        if tier is Tier.DEVICE:
            item.device = None
            self.device_arena.free(copy.place)
        else:
            item.host = None
            self.host_arena.free(copy.place)

    # -- events ---------------------------------------------------------------------------------

    def read_done(self, unit: int) -> None:
        host = self.units[unit].host
        assert host is not None
        host.valid = True
        host.holds -= 1

    def copy_done(self, unit: int) -> None:
        item = self.units[unit]
        assert item.host is not None and item.device is not None
        item.host.holds -= 1
        item.device.holds -= 1
        item.device.valid = item.device.holds == 0
        if item.updating:
            self._give_up_device(unit)

    def begin_update(self, unit: int) -> None:
        """An update is queued: the device copy is of no more use, unless it stays for good."""
        item = self.units[unit]
        assert item.pins == 0, f"unit {unit} is in use and cannot be updated"
        self.updating.add(unit)
        item.updating, item.turn = True, self.updates_begun
        self.updates_begun += 1
        self._give_up_device(unit)

    def _give_up_device(self, unit: int) -> None:
        """An update makes the device copy stale: its room is free once it has arrived, and once
        no graph holds it."""
        item = self.units[unit]
        if item.device is None or item.device.fixed or item.device.holds:
            return
        if item.device.place in item.kept:
            self.orphan(unit)
        else:
            self.drop(unit, Tier.DEVICE)

    def orphan(self, unit: int) -> None:
        """Forgets the copy that compute has used; a graph still has its slot.  Without one that may
        be forgotten so, does nothing."""
        item, copy = self.units[unit], self.compute_copy(unit)
        if copy is None or copy.fixed or copy.holds or not copy.valid or item.pins:
            return
        assert copy.place in item.kept
        self.moved[copy.place.tier].discard(unit)
        if copy is item.device:
            item.device = None
        else:
            item.host = None

    def may_update(self, unit: int) -> bool:
        """Whether no copy of the old values is under way any more."""
        device = self.units[unit].device
        return device is None or device.holds == 0

    def keep(self, unit: int) -> None:
        """Compute let go of the unit, and a graph still has a storage over its slot."""
        copy = self.compute_copy(unit)
        assert copy is not None
        kept = self.units[unit].kept
        kept[copy.place] = kept.get(copy.place, 0) + 1

    def freed(self, unit: int, place: Place) -> None:
        """A graph let go of a storage over this slot of the unit."""
        kept, copy = self.units[unit].kept, self.compute_copy(unit)
        kept[place] -= 1
        if not kept[place]:
            del kept[place]
            if copy is None or copy.place != place:
                self.compute_arena.free(place)

    def hold_host(self, unit: int) -> None:
        """The update is about to use the host copy."""
        host = self.units[unit].host
        assert host is not None and host.valid
        host.holds += 1

    def updated(self, unit: int) -> None:
        """The host copy has new values: write it back, and refresh or drop the device copy."""
        item, home = self.units[unit], self.layout.homes[unit]
        item.updating = False
        self.updating.discard(unit)
        self.updates_done += 1
        if home.weights is Tier.DEVICE:
            return
        assert item.host is not None
        if item.device is not None:
            if item.device.fixed:
                self._copy_in(unit, item)
            else:
                self.drop(unit, Tier.DEVICE)
        if home.weights is Tier.NVME:
            item.stored = False
            self._emit(Write(Item(Kind.WEIGHTS, unit), item.roles.target(), item.host.place))
        else:
            item.host.holds -= 1

    def write_done(self, unit: int) -> None:
        item = self.units[unit]
        assert item.host is not None
        item.roles.wrote()
        item.stored = True
        item.host.holds -= 1
