"""The policy for weights: onload them, keep them while compute uses them, update, write back."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ..facts.tier import Tier
from .arena import Place
from .items import Copy, Item, Items, Move
from .layout import Layout
from .messages import Held, Key, Kind, Read, Write
from .order import NEVER, Order, Use

# Note [Slots that graphs keep]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# While a unit is onloaded, its parameters are views of a slot.  When compute releases the unit, an
# autograd graph may still hold a storage over the slot.  The slot must not be reused until that
# storage is gone, or the graph would read other data.
#
# ``Release`` therefore reports such storages as ``Held`` tokens, and ``Freed`` reports each one
# once it has expired.  ``UnitWeights.kept`` has the tokens by slot.  An exception may interrupt the
# reporting, so a report may come twice, or ``Freed`` without ``Release``.  Tokens make this
# harmless.
#
# ``kept`` has two kinds of slots:
#
# * The slot of the current copy in the compute tier.  ``may_go`` keeps that copy from eviction.
# * The slots of copies that were forgotten, because an update made them stale or because the graph
#   might write to them.  ``_orphan`` forgets a copy without freeing its slot.  ``freed`` frees the
#   slot when its last token is gone.


class UnitWeights(Item):
    """The weights of one unit.

    Attributes:
        pins: compute's uses of the copy in the compute tier.
        kept: by slot, the tokens of storages that graphs keep over it.  See Note [Slots that graphs
            keep].
        updating: whether an update is queued or runs; compute does not use the unit until it ends.
        turn: the position of the unit's last update in the sequence of all updates.
    """

    __slots__ = ("kept", "pins", "turn", "updating")

    def __init__(self, unit: int, nbytes: int, slot_bytes: int, *, pair: bool) -> None:
        super().__init__(Key(Kind.WEIGHTS, unit), nbytes, pair=pair, slot_bytes=slot_bytes)
        self.kept: dict[Place, set[int]] = {}
        self.pins = self.turn = 0
        self.updating = False


class Weights:
    """The weights of all units.  Copies are evicted in the order of their next known use."""

    def __init__(self, layout: Layout, order: Order, items: Items) -> None:
        self.layout, self.order, self._items = layout, order, items
        items.govern(Kind.WEIGHTS, self)
        self.updates_begun = self.updates_done = 0
        self.drains = False  # whether all queued updates run before any further compute
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
        """The number of queued updates that run before any use in the recorded order."""
        return self.updates_begun - self.updates_done if self.drains else 0

    def next_compute(self, unit: int) -> int:
        """Return how many uses away the next compute with the unit is."""
        users = self.layout.users[unit]
        if len(users) == 1:  # mostly
            return self.order.next_use(Use.COMPUTE, users[0])
        return min(self.order.next_use(Use.COMPUTE, user) for user in users)

    def compute_copy(self, unit: int) -> Copy | None:
        """Return the copy that compute uses, if there is one."""
        return self.units[unit].copy(self.layout.tier_of(unit))

    def usable(self, unit: int) -> bool:
        """Return whether compute may use the unit now.

        On a device, a copy may still be on its way: compute's stream waits for it.
        """
        copy = self.compute_copy(unit)
        if copy is None or self.units[unit].updating:
            return False
        return self.layout.has_device or copy.valid

    def host_valid(self, unit: int) -> bool:
        """Return whether there is a valid host copy."""
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
        if item.updating:  # the update uses it at its turn in the queue
            return max(0, item.turn - self.updates_done)  # others may have been moved ahead of it
        return min(compute, update) + self.queued

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        assert isinstance(item, UnitWeights)
        if item.key.number not in spare:
            return False
        if tier is self.layout.tier_of(item.key.number) or item.updating:
            return True
        return item.device is None or not item.device.valid  # compute no longer needs a host copy

    def moved(self, item: Item, work: Move) -> None:
        assert isinstance(item, UnitWeights)
        if not isinstance(work, (Read, Write)) and item.updating:
            self._give_up_device(item)

    # -- toward compute -------------------------------------------------------------------------

    def toward_compute(
        self, unit: int, distance: int, spare: Container[int] = (), *, guess: bool = False
    ) -> bool:
        """Move a unit one tier closer to compute, unless it is there or on its way.

        Args:
            distance: how many uses away the unit is (-1: now).  Only copies that are used later are
                evicted for it.
            spare: units that must not be evicted.
            guess: this is a prefetch.

        Returns:
            ``False`` if there is no room at this distance.
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
        """Return the tier in which the unit needs room next on its way to compute."""
        if self.layout.apart[unit] and not self.host_valid(unit):
            return Tier.HOST
        return self.layout.tier_of(unit)

    def toward_host(
        self, unit: int, distance: int, spare: Container[int] = (), *, guess: bool = False
    ) -> bool:
        """Start to read a unit into host memory, unless it is there or on its way.

        Takes the arguments of ``toward_compute``; returns ``False`` if there is no room.
        """
        item = self.units[unit]
        if item.host is not None:
            return True
        if self._items.make_room(item, Tier.HOST, distance, spare, guess=guess) is None:
            return False
        assert item.stored, f"unit {unit} has no current copy to read"
        self._items.read(item, urgent=distance < 0)
        return True

    def drop_unused(self, tiers: Iterable[Tier]) -> None:
        """Drop every copy in these tiers that may be dropped."""
        for tier in tiers:
            for item in self.units:
                if self._items.may_drop(item, tier):
                    self._items.drop(item, tier)

    # -- compute's uses -------------------------------------------------------------------------

    def pin(self, unit: int) -> Place:
        """Record that compute uses the unit from now on; return its place."""
        copy = self.compute_copy(unit)
        assert copy is not None
        self._items.use(self.units[unit])
        self.units[unit].pins += 1
        return copy.place

    def unpin(self, unit: int) -> None:
        """Record that compute has finished one use of the unit."""
        item = self.units[unit]
        assert item.pins > 0, f"unit {unit} was released more often than needed"
        item.pins -= 1

    def keep(self, held: Held) -> None:
        """Record that a graph still has a storage over a slot that compute has released.

        See Note [Slots that graphs keep].  A repeated report changes nothing.
        """
        self.units[held.unit].kept.setdefault(held.place, set()).add(held.token)

    def freed(self, held: Held) -> None:
        """Record that a storage is gone; free its slot if it was the last one and the slot's copy
        is forgotten.  A storage that ``keep`` was never called for is ignored."""
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
        """Forget all copies whose slots graphs keep, since the graphs may write there."""
        for item in self.units:
            copy = self.compute_copy(item.key.number)
            if copy is not None and copy.place in item.kept:
                self._orphan(item)

    def _orphan(self, item: UnitWeights) -> None:
        """Forget the copy in the compute tier, whose slot a graph keeps, without freeing the slot.

        Does nothing if that copy is fixed, in use or not valid.
        """
        tier = self.layout.tier_of(item.key.number)
        copy = item.copy(tier)
        if copy is None or copy.fixed or copy.holds or not copy.valid or item.pins:
            return
        assert copy.place in item.kept
        self._items.forget(item, tier)

    # -- updates --------------------------------------------------------------------------------

    def begin_update(self, unit: int) -> None:
        """Record that an update is queued, and drop the device copy unless it is fixed."""
        item = self.units[unit]
        assert item.pins == 0, f"unit {unit} is in use and cannot be updated"
        self.updating.add(unit)
        item.updating, item.turn = True, self.updates_begun
        self.updates_begun += 1
        self._give_up_device(item)

    def _give_up_device(self, item: UnitWeights) -> None:
        """Drop the device copy, which an update makes stale, unless it is fixed or still moves.

        If a graph keeps its slot, the slot is freed later.
        """
        if item.device is None or item.device.fixed or item.device.holds:
            return
        if item.device.place in item.kept:
            self._orphan(item)
        else:
            self._items.drop(item, Tier.DEVICE)

    def may_update(self, unit: int) -> bool:
        """Return whether no copy of the old values is in progress."""
        device = self.units[unit].device
        return device is None or device.holds == 0

    def hold_host(self, unit: int) -> None:
        """Hold the host copy for an update."""
        host = self.units[unit].host
        assert host is not None and host.valid
        self._items.use(self.units[unit])
        host.holds += 1

    def updated(self, unit: int) -> bool:
        """Handle the end of an update, which has changed the copy in the unit's home.

        Refreshes a fixed device copy and drops any other.  Starts to write back a unit that lives
        on disk.

        Returns:
            Whether a write was started.
        """
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
