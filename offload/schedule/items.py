"""Items: everything that moves, with its copies in memory and its extents on disk.

One mechanism places, moves, holds and drops items of all kinds.  The policy of each kind decides
what is needed when, and which copies to evict.  Items may be added and removed while the engine
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Protocol

from ..facts.tier import Tier
from .arena import Arena, Place, Tally
from .guesses import GuessCredit
from .layout import Layout, Region
from .messages import Clear, CopyIn, CopyOut, Instruction, Key, Kind, Read, Refuse, Write

Move = Read | Clear | Write | CopyIn | CopyOut


class Roles:
    """The two extents of an item on disk: the committed one, and the ``newest``, which reads use.

    -1 means none: the item reads as zeros.  A write never targets the committed extent.  Without
    durability there is one extent, and it is never committed.
    """

    __slots__ = ("committed", "newest", "pair")

    def __init__(self, pair: bool) -> None:
        self.pair, self.committed, self.newest = pair, -1, -1

    @property
    def written(self) -> bool:
        """Whether any extent was written."""
        return self.newest >= 0

    def target(self) -> int:
        """Return the extent that the next write goes to."""
        return 1 if self.pair and self.committed == 0 else 0

    def wrote(self) -> None:
        self.newest = self.target()


class Copy:
    """A copy of an item in a memory tier.

    Attributes:
        place: where its bytes are, at the beginning of its ``slot``.
        slot: the memory allocated for it.
        valid: whether it has arrived.
        fixed: whether it never leaves.
        holds: readers and writers in progress; it must not be dropped while there are any.
        guess: for a prefetched copy that nothing has used yet, the number of departures from the
            recorded order before the prefetch; else ``None``.
    """

    __slots__ = ("fixed", "guess", "holds", "place", "slot", "valid")

    def __init__(self, place: Place, slot: Place, *, valid: bool, fixed: bool) -> None:
        self.place, self.slot, self.valid, self.fixed, self.holds = place, slot, valid, fixed, 0
        self.guess: int | None = None


class Item:
    """One thing that moves, with its copies.

    Attributes:
        stored: whether the newest extent on disk is current.
        evicted_for: by tier, the prefetched copy that replaced the item's copy there.
    """

    __slots__ = (
        "device",
        "evicted_for",
        "host",
        "key",
        "nbytes",
        "roles",
        "slot_bytes",
        "stored",
    )

    def __init__(
        self, key: Key, nbytes: int, *, pair: bool = False, slot_bytes: int | None = None
    ) -> None:
        """
        Args:
            pair: whether it has two extents on disk, for commits.
            slot_bytes: bytes of its slot in the device tier, if not ``nbytes``.
        """
        self.key, self.nbytes, self.roles, self.stored = key, nbytes, Roles(pair), False
        self.slot_bytes = nbytes if slot_bytes is None else slot_bytes
        self.host: Copy | None = None
        self.device: Copy | None = None
        self.evicted_for: dict[Tier, Copy] = {}

    def copy(self, tier: Tier) -> Copy | None:
        """Return the copy in a memory tier, if there is one."""
        return self.device if tier is Tier.DEVICE else self.host

    def _set(self, tier: Tier, copy: Copy | None) -> None:
        if tier is Tier.DEVICE:
            self.device = copy
        else:
            self.host = copy

    def fix(self, place: Place, tier: Tier | None = None) -> None:
        """Give the item a fixed copy in ``place``, as its copy in ``tier`` (default: the tier of
        the place)."""
        self._set(tier or place.tier, Copy(place, place, valid=True, fixed=True))


class Policy(Protocol):
    """The decisions that differ by kind of item."""

    def next_use(self, item: Item, tier: Tier) -> int:
        """Return how many uses away the next use of the item's copy in that tier is."""
        ...

    def may_go(self, item: Item, tier: Tier) -> bool:
        """Return whether the item's copy, which is valid and clean, is unused."""
        ...

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        """Return whether to keep the copy if the items numbered ``spare`` must not be evicted."""
        ...

    def moved(self, item: Item, work: Move) -> None:
        """Handle the end of a move of the item."""
        ...


class Items:
    """All items, and the regions that they move through."""

    def __init__(self, layout: Layout, emit: Callable[[Instruction], None]) -> None:
        self._layout, self._emit = layout, emit
        # By region: its arena, and the items that have a copy there which is not fixed.
        self._regions: dict[Region, tuple[Arena, set[Item]]] = {}
        self._of_kind: dict[tuple[Kind, Tier], tuple[Region, Arena, set[Item]]] = {}
        self._by_tier: dict[Tier, list[Arena]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._policies: dict[Kind, Policy] = {}
        self._items: dict[Key, Item] = {}
        self._credits: dict[tuple[Kind, Tier], GuessCredit] = {}
        self._departures = 0

    def govern(self, kind: Kind, policy: Policy) -> None:
        """Set the policy of a kind, and create its regions."""
        self._policies[kind] = policy
        for tier, arenas in self._by_tier.items():
            region = self._layout.region(kind, tier)
            if region not in self._regions:
                make = Tally if kind is Kind.SAVED and tier is Tier.DEVICE else Arena
                self._regions[region] = make(tier, region.base, region.nbytes), set()
                arenas.append(self._regions[region][0])
            self._of_kind[kind, tier] = region, *self._regions[region]
            self._credits[kind, tier] = GuessCredit()

    # -- items and regions ----------------------------------------------------------------------

    def add(self, item: Item) -> None:
        """Add an item."""
        assert item.key not in self._items, f"there is {item.key} already"
        self._items[item.key] = item
        for tier in self._by_tier:
            at_once = self._layout.prefetch_depth * item.nbytes
            self._credits[item.key.kind, tier].allow(at_once)

    def remove(self, item: Item) -> None:
        """Remove an item and its copies.  No move of it may be in progress."""
        for tier in (Tier.DEVICE, Tier.HOST):
            if (copy := item.copy(tier)) is not None and not copy.fixed:
                self.discard(item, tier)
        del self._items[item.key]

    def of(self, key: Key) -> Item:
        """Return the item with that key."""
        return self._items[key]

    def all(self) -> list[Item]:
        """Return all items."""
        return list(self._items.values())

    def arena(self, kind: Kind, tier: Tier) -> Arena:
        """Return the arena that allocates slots for a kind in a tier."""
        return self._of_kind[kind, tier][1]

    def regions(self) -> dict[Region, tuple[Arena, set[Item]]]:
        """Return every region with its arena and the items that have a copy in it."""
        return self._regions

    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes in use in the regions of (device, host) memory."""
        device = host = 0
        for arena in self._by_tier[Tier.DEVICE]:
            device += arena.used_bytes
        for arena in self._by_tier[Tier.HOST]:
            host += arena.used_bytes
        # Without a device, the regions called DEVICE are in host memory too.
        return (device, host) if self._layout.has_device else (0, host + device)

    def occupied(self) -> list[Place]:
        """Return the places of all copies in the regions, except where bytes are only counted."""
        return [
            copy.place
            for region, (arena, tenants) in self._regions.items()
            if not arena.counts_only
            for item in tenants
            if (copy := item.copy(region.tier)) is not None and copy.place.nbytes
        ]

    # -- room -----------------------------------------------------------------------------------

    def make_room(
        self, item: Item, tier: Tier, distance: int | None = None, spare: Container[int] = (), *,
        guess: bool = False,
    ) -> Copy | None:  # fmt: skip
        """Allocate a slot for the item, evicting other copies if needed.

        Args:
            distance: how many uses away the item is (-1: now).  Copies that are used later may be
                evicted.  ``None``: evict nothing.
            spare: numbers of items that must not be evicted, as their policies interpret it.
            guess: this is a prefetch; see Note [Limit on wrong guesses].

        Returns:
            The item's new copy, not valid yet; ``None`` if there is no room.
        """
        if guess and not self.may_guess(item.key.kind):
            return None
        region, arena, tenants = self._of_kind[item.key.kind, tier]
        own = item.slot_bytes if tier is Tier.DEVICE else item.nbytes
        nbytes = region.slot_bytes or own
        slot, evicted = arena.allocate(nbytes), list[Item]()
        if slot is None and distance is not None:
            slot, evicted = self._evict_for(arena, tenants, nbytes, distance, spare)
        if slot is None:
            return None
        place = slot if slot.nbytes == own else Place(tier, slot.offset, own)
        copy = Copy(place, slot, valid=False, fixed=False)
        copy.guess = self._departures if guess else None
        self._account_for(item, copy, tier, evicted)
        item._set(tier, copy)
        tenants.add(item)
        return copy

    def _account_for(self, item: Item, copy: Copy, tier: Tier, evicted: Iterable[Item]) -> None:
        """Update the credit for a copy to be moved to a tier, in place of the ``evicted`` ones."""
        replaced_by = item.evicted_for.pop(tier, None)
        credit = self._credits[item.key.kind, tier]
        if copy.guess is not None:
            credit.guess(item.nbytes)
            for other in evicted:
                other.evicted_for[tier] = copy
            return
        credit.needed(item.nbytes)
        if replaced_by is not None and self._is_wrong(replaced_by):
            credit.wasted(item.nbytes)

    def _is_wrong(self, copy: Copy) -> bool:
        """Return whether a copy is a guess, and compute has left the recorded order since."""
        return copy.guess is not None and copy.guess < self._departures

    def take(self, item: Item, tier: Tier, *, valid: bool) -> None:
        """Count the item as present, or as about to come, in a tier that only counts bytes.

        Unlike ``make_room``, this may exceed the room.
        """
        _, arena, tenants = self._of_kind[item.key.kind, tier]
        assert isinstance(arena, Tally)
        place = arena.take(item.slot_bytes)
        item._set(tier, Copy(place, place, valid=valid, fixed=False))
        tenants.add(item)

    def _evict_for(
        self, arena: Arena, tenants: set[Item], nbytes: int, distance: int, spare: Container[int]
    ) -> tuple[Place | None, list[Item]]:
        """Drop copies until ``nbytes`` fit, first those whose next use is latest.

        Returns:
            The slot and the items whose copies were dropped; ``None`` and no items if the allowed
            evictions would not free enough.
        """
        tier = arena.tier
        idle: list[tuple[Item, Copy]] = []
        for item in tenants:
            copy = item.copy(tier)
            assert copy is not None
            if not copy.holds and copy.slot.nbytes and self.may_drop(item, tier):
                idle.append((item, copy))
        # Uses take the most time to look up, and often not even all of them would be enough.
        if not idle or not arena.fits_after(nbytes, [copy.slot for _, copy in idle]):
            return None, []
        victims: list[tuple[int, int, Item, Copy]] = []
        for item, copy in idle:
            policy = self._policies[item.key.kind]
            use = policy.next_use(item, tier)
            if use > distance and not policy.spares(item, tier, spare):
                victims.append((use, item.key.number, item, copy))
        if len(victims) < len(idle) and not (
            victims and arena.fits_after(nbytes, [copy.slot for _, _, _, copy in victims])
        ):
            return None, []
        victims.sort(key=lambda victim: (-victim[0], victim[1]))
        for number, (_, _, item, _) in enumerate(victims, 1):
            self.drop(item, tier)
            slot = arena.allocate(nbytes)
            if slot is not None:
                return slot, [item for _, _, item, _ in victims[:number]]
        raise AssertionError("an arena that would fit after all evictions did not")

    def may_drop(self, item: Item, tier: Tier) -> bool:
        """Return whether the copy may be dropped: it is valid, unused, not fixed, and a lower tier
        has a current copy."""
        copy = item.copy(tier)
        if copy is None or copy.fixed or not copy.valid or copy.holds:
            return False
        below = item.stored or (tier is Tier.DEVICE and item.host is not None and item.host.valid)
        return below and self._policies[item.key.kind].may_go(item, tier)

    def drop(self, item: Item, tier: Tier) -> None:
        """Drop a clean copy and free its slot."""
        assert self.may_drop(item, tier), f"{item.key} must not be evicted from {tier.value}"
        self.discard(item, tier)

    def discard(self, item: Item, tier: Tier) -> None:
        """Drop a copy, clean or not, and free its slot."""
        self.free(item.key.kind, self.forget(item, tier))

    def forget(self, item: Item, tier: Tier) -> Place:
        """Drop a copy whose slot is still in use.

        Returns:
            The slot.  The caller must ``free`` it once it is unused.
        """
        copy = item.copy(tier)
        assert copy is not None and not copy.fixed
        if copy.guess is not None:
            self._credits[item.key.kind, tier].end_guess(item.nbytes)
            if self._is_wrong(copy):
                self._waste(item, tier)
        item._set(tier, None)
        self._of_kind[item.key.kind, tier][2].discard(item)
        return copy.slot

    def use(self, item: Item) -> None:
        """Record that the item's copies are used: prefetched ones were needed."""
        for tier in self._by_tier:
            if (copy := item.copy(tier)) is not None and copy.guess is not None:
                copy.guess = None
                self._credits[item.key.kind, tier].end_guess(item.nbytes)
                self._credits[item.key.kind, tier].needed(item.nbytes)

    def _waste(self, item: Item, tier: Tier) -> None:
        """Charge for a prefetched copy that is dropped unused."""
        if tier is Tier.HOST and item.device is not None:
            return  # the device copy made from it may still be used
        self._credits[item.key.kind, tier].wasted(item.nbytes)
        if tier is Tier.DEVICE and item.host is None:  # the read from disk was unnecessary too
            self._credits[item.key.kind, Tier.HOST].wasted(item.nbytes)

    def may_guess(self, kind: Kind) -> bool:
        """Return whether prefetch has credit for items of a kind in every tier."""
        return all(self._credits[kind, tier] for tier in self._by_tier)

    def left_order(self) -> None:
        """Record that compute needs another unit than the recorded order predicts."""
        self._departures += 1

    def forget_guesses(self) -> None:
        """Stop tracking guesses, before their copies are dropped for another reason."""
        for item in self._items.values():
            for tier in self._by_tier:
                if (copy := item.copy(tier)) is not None and copy.guess is not None:
                    copy.guess = None
                    self._credits[item.key.kind, tier].end_guess(item.nbytes)

    def free(self, kind: Kind, slot: Place) -> None:
        """Free a slot that an item of that kind had."""
        self._of_kind[kind, slot.tier][1].free(slot)

    def refuse(self, ticket: int, key: Key, tier: Tier) -> None:
        """Refuse a ticket, since there is no room for an item in a tier."""
        arena = self.arena(key.kind, tier)
        free = arena.nbytes - arena.used_bytes
        self._emit(Refuse(ticket, key, tier, self._layout.nbytes(key), free))

    # -- moves ----------------------------------------------------------------------------------

    def read(self, item: Item, *, urgent: bool = False) -> None:
        """Read the newest extent into the host copy; fill it with zeros if nothing was written."""
        copy = item.host
        assert copy is not None
        copy.holds += 1
        copy.valid = False
        if item.roles.written:
            self._emit(Read(item.key, item.roles.newest, copy.place, urgent))
        else:
            self._emit(Clear(item.key, copy.place))

    def write(self, item: Item, tier: Tier = Tier.HOST, *, saves: bool = False) -> None:
        """Write the copy in a memory tier to the extent that is not committed."""
        copy = item.copy(tier)
        assert copy is not None
        copy.holds += 1
        item.stored = False
        self._emit(Write(item.key, item.roles.target(), copy.place, saves))

    def copy_in(self, item: Item) -> None:
        """Copy the host copy to the device copy."""
        assert item.host is not None and item.device is not None
        item.host.holds += 1
        item.device.holds += 1
        item.device.valid = False
        self._emit(CopyIn(item.key, item.host.place, item.device.place))

    def copy_out(self, item: Item, place: Place | None = None) -> None:
        """Copy the device copy to the host copy, or to another item's ``place`` in host memory."""
        assert item.device is not None
        item.device.holds += 1
        if place is None:
            assert item.host is not None
            item.host.holds += 1
            item.host.valid, place = False, item.host.place
        self._emit(CopyOut(item.key, item.device.place, place))

    def ended(self, work: Move) -> None:
        """Handle the end of a move: release the copies that it held, and mark what is current."""
        item = self._items[work.item]
        if isinstance(work, (Read, Clear)):
            assert item.host is not None
            item.host.holds -= 1
            item.host.valid = True
        elif isinstance(work, Write):
            copy = item.copy(work.place.tier)
            assert copy is not None
            copy.holds -= 1
            item.roles.wrote()
            item.stored = True
        else:
            host, device = item.host, item.device
            assert device is not None
            device.holds -= 1
            if isinstance(work, CopyIn):
                assert host is not None
                host.holds -= 1
                device.valid = device.holds == 0
            elif host is not None and host.place == work.place:
                host.holds -= 1
                host.valid = True
        self._policies[work.item.kind].moved(item, work)
