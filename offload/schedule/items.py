"""What moves: items with their copies in memory and their extents on disk; one mechanism for all.

An item may be added and removed while the engine runs.  This knows how it is placed, moved, held
and dropped; what is wanted when, and who gives way, is the policy of its kind.
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


class Copy:
    """A copy of an item in a memory tier, in ``place``, which begins the ``slot`` it was given.

    ``valid`` once it has arrived; ``fixed``: it never leaves; ``holds`` counts what still reads or
    writes it, each a reason not to drop it.  ``guess``: if it was prefetched and nothing has used
    it yet, the number of departures from the recorded order before that; else ``None``.
    """

    __slots__ = ("fixed", "guess", "holds", "place", "slot", "valid")

    def __init__(self, place: Place, slot: Place, *, valid: bool, fixed: bool) -> None:
        self.place, self.slot, self.valid, self.fixed, self.holds = place, slot, valid, fixed, 0
        self.guess: int | None = None


class Item:
    """One thing that moves.

    ``stored``: the newest extent is current.  ``evicted_for``: by tier, the guess that replaced its
    copy there.
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
        """``slot_bytes``: what it takes with compute, if not ``nbytes``."""
        self.key, self.nbytes, self.roles, self.stored = key, nbytes, Roles(pair), False
        self.slot_bytes = nbytes if slot_bytes is None else slot_bytes
        self.host: Copy | None = None
        self.device: Copy | None = None
        self.evicted_for: dict[Tier, Copy] = {}

    def copy(self, tier: Tier) -> Copy | None:
        """The copy in a memory tier."""
        return self.device if tier is Tier.DEVICE else self.host

    def _set(self, tier: Tier, copy: Copy | None) -> None:
        if tier is Tier.DEVICE:
            self.device = copy
        else:
            self.host = copy

    def fix(self, place: Place, tier: Tier | None = None) -> None:
        """The item has a home of its own there, which it never leaves; ``tier``: as whose copy, if
        not as that of the place."""
        self._set(tier or place.tier, Copy(place, place, valid=True, fixed=True))


class Policy(Protocol):
    """What differs by kind."""

    def next_use(self, item: Item, tier: Tier) -> int:
        """How many uses away the next use of the item's copy in that tier is."""
        ...

    def may_go(self, item: Item, tier: Tier) -> bool:
        """Whether nobody uses the copy, which has arrived and is clean."""
        ...

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        """Whether the copy must not give way, where the items numbered ``spare`` must not."""
        ...

    def moved(self, item: Item, work: Move) -> None:
        """A move of the item has ended."""
        ...


class Items:
    """All items, and the regions that they move through."""

    def __init__(self, layout: Layout, emit: Callable[[Instruction], None]) -> None:
        self._layout, self._emit = layout, emit
        # By region, its arena, and the items with a copy there that is not fixed.
        self._regions: dict[Region, tuple[Arena, set[Item]]] = {}
        self._of_kind: dict[tuple[Kind, Tier], tuple[Region, Arena, set[Item]]] = {}
        self._by_tier: dict[Tier, list[Arena]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._policies: dict[Kind, Policy] = {}
        self._items: dict[Key, Item] = {}
        self._credits: dict[tuple[Kind, Tier], GuessCredit] = {}
        self._departures = 0

    def govern(self, kind: Kind, policy: Policy) -> None:
        """Items of this kind follow that policy."""
        self._policies[kind] = policy
        for tier, arenas in self._by_tier.items():
            region = self._layout.region(kind, tier)
            if region not in self._regions:
                make = Tally if kind is Kind.SAVED and tier is Tier.DEVICE else Arena
                self._regions[region] = make(tier, region.base, region.nbytes), set()
                arenas.append(self._regions[region][0])
            self._of_kind[kind, tier] = region, *self._regions[region]
            self._credits[kind, tier] = GuessCredit()

    # -- what there is --------------------------------------------------------------------------

    def add(self, item: Item) -> None:
        """From now on there is this item."""
        assert item.key not in self._items, f"there is {item.key} already"
        self._items[item.key] = item
        for tier in self._by_tier:
            at_once = self._layout.prefetch_depth * item.nbytes
            self._credits[item.key.kind, tier].allow(at_once)

    def remove(self, item: Item) -> None:
        """The item is gone, with its copies; nothing moves it."""
        for tier in (Tier.DEVICE, Tier.HOST):
            if (copy := item.copy(tier)) is not None and not copy.fixed:
                self.discard(item, tier)
        del self._items[item.key]

    def of(self, key: Key) -> Item:
        """The item of that key."""
        return self._items[key]

    def all(self) -> list[Item]:
        """Every item that there is."""
        return list(self._items.values())

    def arena(self, kind: Kind, tier: Tier) -> Arena:
        """What items of a kind are given room from."""
        return self._of_kind[kind, tier][1]

    def regions(self) -> dict[Region, tuple[Arena, set[Item]]]:
        """Every region with its arena, and the items that have a copy in it."""
        return self._regions

    def used_bytes(self) -> tuple[int, int]:
        """Of the regions of (device, host) memory."""
        device = host = 0
        for arena in self._by_tier[Tier.DEVICE]:
            device += arena.used_bytes
        for arena in self._by_tier[Tier.HOST]:
            host += arena.used_bytes
        # Where compute has no memory of its own, what is counted as there is in host memory.
        return (device, host) if self._layout.has_device else (0, host + device)

    # -- room -----------------------------------------------------------------------------------

    def make_room(
        self, item: Item, tier: Tier, distance: int | None = None, spare: Container[int] = (), *,
        guess: bool = False,
    ) -> Copy | None:  # fmt: skip
        """Gives the item a copy that nothing has come to yet; ``None``: there is no room.

        ``distance``: how many uses away the item is (-1: now); copies that are used later give way,
        but none of those that are to be spared.  ``None``: none gives way.  ``guess``: nothing has
        asked for the copy yet; see Note [Limit on wrong guesses].
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
        """Account for a copy that is about to be moved to a tier, in place of those evicted."""
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
        """Return whether a copy is a guess, and compute left the recorded order after it."""
        return copy.guess is not None and copy.guess < self._departures

    def take(self, item: Item, tier: Tier, *, valid: bool) -> None:
        """The item is there, or will be, whatever room is left; its kind is only counted there."""
        _, arena, tenants = self._of_kind[item.key.kind, tier]
        assert isinstance(arena, Tally)
        place = arena.take(item.nbytes)
        item._set(tier, Copy(place, place, valid=valid, fixed=False))
        tenants.add(item)

    def _evict_for(
        self, arena: Arena, tenants: set[Item], nbytes: int, distance: int, spare: Container[int]
    ) -> tuple[Place | None, list[Item]]:
        """Return a slot, and the items whose copies were dropped for it."""
        tier = arena.tier
        victims: list[tuple[int, int, Item, Copy]] = []
        for item in tenants:
            copy = item.copy(tier)
            assert copy is not None
            if copy.holds or not copy.slot.nbytes or not self.may_drop(item, tier):
                continue
            policy = self._policies[item.key.kind]
            use = policy.next_use(item, tier)
            if use > distance and not policy.spares(item, tier, spare):
                victims.append((use, item.key.number, item, copy))
        if not victims or not arena.fits_after(nbytes, [copy.slot for _, _, _, copy in victims]):
            return None, []
        victims.sort(key=lambda victim: (-victim[0], victim[1]))
        for number, (_, _, item, _) in enumerate(victims, 1):
            self.drop(item, tier)
            slot = arena.allocate(nbytes)
            if slot is not None:
                return slot, [item for _, _, item, _ in victims[:number]]
        raise AssertionError("an arena that would fit after all evictions did not")

    def may_drop(self, item: Item, tier: Tier) -> bool:
        """Whether the copy may be dropped: arrived, unused, not fixed, and current further down."""
        copy = item.copy(tier)
        if copy is None or copy.fixed or not copy.valid or copy.holds:
            return False
        below = item.stored or (tier is Tier.DEVICE and item.host is not None and item.host.valid)
        return below and self._policies[item.key.kind].may_go(item, tier)

    def drop(self, item: Item, tier: Tier) -> None:
        """Forgets a clean copy and frees its slot."""
        assert self.may_drop(item, tier), f"{item.key} must not be evicted from {tier.value}"
        self.discard(item, tier)

    def discard(self, item: Item, tier: Tier) -> None:
        """Forgets a copy, whatever is in it, and frees its slot."""
        self.free(item.key.kind, self.forget(item, tier))

    def forget(self, item: Item, tier: Tier) -> Place:
        """Forgets a copy whose slot somebody still uses; the slot, to be freed when it is not."""
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
        """Record that the item's copies are used: those that were prefetched were needed."""
        for tier in self._by_tier:
            if (copy := item.copy(tier)) is not None and copy.guess is not None:
                copy.guess = None
                self._credits[item.key.kind, tier].end_guess(item.nbytes)
                self._credits[item.key.kind, tier].needed(item.nbytes)

    def _waste(self, item: Item, tier: Tier) -> None:
        """Charge a prefetched copy that is given up unused."""
        if tier is Tier.HOST and item.device is not None:
            return  # the device copy made from it may still be used
        self._credits[item.key.kind, tier].wasted(item.nbytes)
        if tier is Tier.DEVICE and item.host is None:  # it would be read again
            self._credits[item.key.kind, Tier.HOST].wasted(item.nbytes)

    def may_guess(self, kind: Kind) -> bool:
        """Return whether prefetch has credit for items of a kind in every tier."""
        return all(self._credits[kind, tier] for tier in self._by_tier)

    def left_order(self) -> None:
        """Record that compute needs something else than the recorded order predicts."""
        self._departures += 1

    def forget_guesses(self) -> None:
        """Forget which copies are guesses: they are about to be dropped for another reason."""
        for item in self._items.values():
            for tier in self._by_tier:
                if (copy := item.copy(tier)) is not None and copy.guess is not None:
                    copy.guess = None
                    self._credits[item.key.kind, tier].end_guess(item.nbytes)

    def free(self, kind: Kind, slot: Place) -> None:
        """Nobody uses the slot, which an item of that kind had, any more."""
        self._of_kind[kind, slot.tier][1].free(slot)

    def refuse(self, ticket: int, key: Key, tier: Tier) -> None:
        """Tells whoever asked that an item finds no room."""
        arena = self.arena(key.kind, tier)
        free = arena.nbytes - arena.used_bytes
        self._emit(Refuse(ticket, key, tier, self._layout.nbytes(key), free))

    # -- moves ----------------------------------------------------------------------------------

    def read(self, item: Item, *, urgent: bool = False) -> None:
        """From the newest extent to the host copy; zeroes where nothing was ever written."""
        copy = item.host
        assert copy is not None
        copy.holds += 1
        copy.valid = False
        if item.roles.written:
            self._emit(Read(item.key, item.roles.newest, copy.place, urgent))
        else:
            self._emit(Clear(item.key, copy.place))

    def write(self, item: Item, tier: Tier = Tier.HOST, *, saves: bool = False) -> None:
        """From a memory copy to the extent that is not committed."""
        copy = item.copy(tier)
        assert copy is not None
        copy.holds += 1
        item.stored = False
        self._emit(Write(item.key, item.roles.target(), copy.place, saves))

    def copy_in(self, item: Item) -> None:
        """From the host copy to the device copy."""
        assert item.host is not None and item.device is not None
        item.host.holds += 1
        item.device.holds += 1
        item.device.valid = False
        self._emit(CopyIn(item.key, item.host.place, item.device.place))

    def copy_out(self, item: Item, place: Place | None = None) -> None:
        """From the device copy to the host copy, or to another item's ``place`` in host memory."""
        assert item.device is not None
        item.device.holds += 1
        if place is None:
            assert item.host is not None
            item.host.holds += 1
            item.host.valid, place = False, item.host.place
        self._emit(CopyOut(item.key, item.device.place, place))

    def ended(self, work: Move) -> None:
        """A move has ended: the copies that it read or wrote are let go."""
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
