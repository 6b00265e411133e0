"""The policy of weights: brought toward compute, kept while it uses them, updated, written back."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ..facts.tier import Tier
from .arena import Place
from .items import Copy, Item, Items, Move
from .layout import Layout
from .messages import Held, Key, Kind, Read, Write
from .order import NEVER, Order, Use


class UnitWeights(Item):
    """The weights of one unit.

    ``pins`` counts compute's uses of the copy in the compute tier.  ``kept`` has, for each slot,
    the tokens of storages that graphs keep over it after compute let go: the copy's own slot, and
    those of copies that are forgotten, which only such storages still use.  ``updating`` says that
    an update is queued: until it is done nobody computes with the unit; ``turn`` is its place in
    that queue.
    """

    __slots__ = ("kept", "pins", "turn", "updating")

    def __init__(self, unit: int, nbytes: int, slot_bytes: int, *, pair: bool) -> None:
        super().__init__(Key(Kind.WEIGHTS, unit), nbytes, pair=pair, slot_bytes=slot_bytes)
        self.kept: dict[Place, set[int]] = {}
        self.pins = self.turn = 0
        self.updating = False


class Weights:
    """Copies come toward compute, and go by the next known use."""

    def __init__(self, layout: Layout, order: Order, items: Items) -> None:
        self.layout, self.order, self._items = layout, order, items
        items.govern(Kind.WEIGHTS, self)
        self.updates_begun = self.updates_done = 0
        self.drains = False  # whether all queued updates come before any further compute
        self.updating: set[int] = set()
        self.units: list[UnitWeights] = []
        for unit, home in zip(layout.units, layout.homes, strict=True):
            slot_bytes = layout.slot_bytes(unit.index)
            item = UnitWeights(unit.index, unit.stored_bytes, slot_bytes, pair=layout.durable)
            fixed = (home.host_place, Tier.HOST), (home.device_place, Tier.DEVICE)
            for place, tier in fixed:
                if place is not None:
                    item.fix(place, tier)
            if home.weights is Tier.NVME or unit.index in layout.in_place:
                item.stored, item.roles.newest = home.weights is Tier.NVME, 0
            items.add(item)
            self.units.append(item)

    # -- questions ------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Queued updates that come before any use that the recorded order foresees."""
        return self.updates_begun - self.updates_done if self.drains else 0

    def next_compute(self, unit: int) -> int:
        """How many uses away the next compute with the unit is."""
        return min(self.order.next_use(Use.COMPUTE, user) for user in self.layout.users[unit])

    def compute_copy(self, unit: int) -> Copy | None:
        """The copy that compute uses."""
        return self.units[unit].copy(self.layout.tier_of(unit))

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

    # -- the policy of the kind -----------------------------------------------------------------

    def may_go(self, item: Item, tier: Tier) -> bool:
        assert isinstance(item, UnitWeights)
        copy = item.copy(tier)
        assert copy is not None
        used = item.pins or copy.place in item.kept
        return not (used and tier is self.layout.tier_of(item.key.number))

    def next_use(self, item: Item, tier: Tier) -> int:
        assert isinstance(item, UnitWeights)
        unit = item.key.number
        compute = self.next_compute(unit)
        update = self.order.next_use(Use.UPDATE, unit)
        if tier is Tier.DEVICE:
            return compute + self.queued if compute < update else NEVER
        if item.updating:  # it is used when its turn in the queue comes
            return max(0, item.turn - self.updates_done)  # others may have been let before it
        return min(compute, update) + self.queued

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        assert isinstance(item, UnitWeights)
        if item.key.number not in spare:
            return False
        if tier is self.layout.tier_of(item.key.number) or item.updating:
            return True
        return item.device is None or not item.device.valid  # there already: here it may go

    def moved(self, item: Item, work: Move) -> None:
        assert isinstance(item, UnitWeights)
        if not isinstance(work, (Read, Write)) and item.updating:
            self._give_up_device(item)

    # -- toward compute -------------------------------------------------------------------------

    def toward_compute(
        self, unit: int, distance: int, spare: Container[int] = (), *, guess: bool = False
    ) -> bool:
        """Brings a unit closer to compute.  ``False``: there is no room at this distance.

        ``distance`` is how many uses away the unit is (-1: now); only copies that are used later
        give way.  ``spare`` names units that must not.  ``guess``: nothing has asked for the unit.
        """
        if not self.layout.apart[unit]:
            return self.toward_host(unit, distance, spare, guess=guess)
        item = self.units[unit]
        if item.device is not None or item.updating:
            return True
        if not self.host_valid(unit):
            return self.toward_host(unit, distance, spare, guess=guess)
        if self._items.make_room(item, Tier.DEVICE, distance, spare, guess=guess) is None:
            return False
        self._items.copy_in(item)
        return True

    def tier_on_the_way(self, unit: int) -> Tier:
        """Return the tier in which the unit needs room next, to come to compute."""
        if self.layout.apart[unit] and not self.host_valid(unit):
            return Tier.HOST
        return self.layout.tier_of(unit)

    def toward_host(
        self, unit: int, distance: int, spare: Container[int] = (), *, guess: bool = False
    ) -> bool:
        """Starts to read a unit into host memory, where it is not there or on its way already."""
        item = self.units[unit]
        if item.host is not None:
            return True
        if self._items.make_room(item, Tier.HOST, distance, spare, guess=guess) is None:
            return False
        assert item.stored, f"unit {unit} has no current copy to read"
        self._items.read(item, urgent=distance < 0)
        return True

    def drop_unused(self, tiers: Iterable[Tier]) -> None:
        """Drops every copy there that may be dropped."""
        for tier in tiers:
            for item in self.units:
                if self._items.may_drop(item, tier):
                    self._items.drop(item, tier)

    # -- compute's uses -------------------------------------------------------------------------

    def pin(self, unit: int) -> Place:
        """Compute uses the unit from now on, where it is."""
        copy = self.compute_copy(unit)
        assert copy is not None
        self._items.use(self.units[unit])
        self.units[unit].pins += 1
        return copy.place

    def unpin(self, unit: int) -> None:
        """Compute lets go of the unit."""
        item = self.units[unit]
        assert item.pins > 0, f"unit {unit} was released more often than needed"
        item.pins -= 1

    def keep(self, held: Held) -> None:
        """Compute let go of a unit, and a graph still has a storage over its slot.  It may be told
        of again."""
        self.units[held.unit].kept.setdefault(held.place, set()).add(held.token)

    def freed(self, held: Held) -> None:
        """A graph let go of a storage; maybe of one that nobody has told of."""
        kept, copy = self.units[held.unit].kept, self.compute_copy(held.unit)
        tokens = kept.get(held.place)
        if tokens is None or held.token not in tokens:
            return
        tokens.remove(held.token)
        if not tokens:
            del kept[held.place]
            if copy is None or copy.place != held.place:
                self._items.free(Kind.WEIGHTS, held.place)

    def forget_kept(self) -> None:
        """No copy whose slot a graph keeps is used again: the graph may write there."""
        for item in self.units:
            copy = self.compute_copy(item.key.number)
            if copy is not None and copy.place in item.kept:
                self._orphan(item)

    def _orphan(self, item: UnitWeights) -> None:
        """Forgets the copy that compute has used; a graph still has its slot.  Without one that may
        be forgotten so, does nothing."""
        tier = self.layout.tier_of(item.key.number)
        copy = item.copy(tier)
        if copy is None or copy.fixed or copy.holds or not copy.valid or item.pins:
            return
        assert copy.place in item.kept
        self._items.forget(item, tier)

    # -- updates --------------------------------------------------------------------------------

    def begin_update(self, unit: int) -> None:
        """An update is queued: the device copy is of no more use, unless it stays for good."""
        item = self.units[unit]
        assert item.pins == 0, f"unit {unit} is in use and cannot be updated"
        self.updating.add(unit)
        item.updating, item.turn = True, self.updates_begun
        self.updates_begun += 1
        self._give_up_device(item)

    def _give_up_device(self, item: UnitWeights) -> None:
        """An update makes the device copy stale: its room is free once it has arrived, and once
        no graph holds it."""
        if item.device is None or item.device.fixed or item.device.holds:
            return
        if item.device.place in item.kept:
            self._orphan(item)
        else:
            self._items.drop(item, Tier.DEVICE)

    def may_update(self, unit: int) -> bool:
        """Whether no copy of the old values is under way any more."""
        device = self.units[unit].device
        return device is None or device.holds == 0

    def hold_host(self, unit: int) -> None:
        """The update is about to use the host copy."""
        host = self.units[unit].host
        assert host is not None and host.valid
        self._items.use(self.units[unit])
        host.holds += 1

    def updated(self, unit: int) -> bool:
        """The copy in the unit's home has new values: refreshes or drops the device copy, and
        writes back what lives on disk; whether it does."""
        item, home = self.units[unit], self.layout.homes[unit]
        item.updating = item.stored = False
        self.updating.discard(unit)
        self.updates_done += 1
        if home.weights is Tier.DEVICE:
            return False
        assert item.host is not None
        item.host.holds -= 1
        if item.device is not None:
            if item.device.fixed:
                self._items.copy_in(item)
            else:
                self._items.drop(item, Tier.DEVICE)
        if home.weights is Tier.NVME:
            self._items.write(item)
        return home.weights is Tier.NVME
