"""The policy for activations: offload first what backward needs last, and reload it in time.

Backward first needs what was saved last.  Saved storages are therefore kept in the order in which
they were saved (the *turn* of a storage).  Storages to offload are taken from the front of this
order, storages to reload from its end.  The engine does not allocate compute's memory.  It only
counts these bytes, and the count may exceed the room, since saved storages exist already.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import chain

from ..facts.tier import Tier
from .items import Item, Items, Move
from .layout import Layout
from .messages import (
    BackwardPhase,
    CopyOut,
    Fetch,
    FreeDeviceCopy,
    FreeItem,
    Grant,
    Instruction,
    Kind,
    Read,
    Refuse,
    Saved,
    SavedDropped,
    Write,
)
from .saved_parts import PartedStorage, is_below, is_in_host_alone

LEAST_BYTES = 1 << 20  # smaller storages stay: moving one costs more than it frees
FIRST_SHARE = 0.75  # offload above this share of the room while the total is not yet known
AT_ONCE = 32  # storages that one signal considers for prefetch


def room_beside(room: int, largest: int) -> int:
    """Return the bytes of ``room`` to fill at most, so that a storage of ``largest`` bytes still
    fits: a storage exists before the engine hears of it.  At least a quarter of ``room``."""
    return max(room - largest, room // 4)


class Activations:
    """The storages that autograd saved, where they are, and the tickets that wait for them."""

    def __init__(self, layout: Layout, items: Items, emit: Callable[[Instruction], None]) -> None:
        self._items, self._emit, self._room = items, emit, layout.saved
        self._has_device, self._whole_room = layout.has_device, layout.saved.compute
        self._largest = 0  # bytes of the largest storage so far
        items.govern(Kind.SAVED, self)
        self._tally = items.arena(Kind.SAVED, Tier.DEVICE)
        self._host = items.arena(Kind.SAVED, Tier.HOST)
        named = self._room.policy in ("host", "nvme")
        self._leaves_at_once = named and (layout.has_device or self._room.policy == "nvme")
        # If host memory is not a tier below compute's, it only stages storages for the disk.
        self._through = self._room.policy == "nvme" or not layout.has_device
        self._saved: dict[int, PartedStorage] = {}
        self._present: dict[int, PartedStorage] = {}  # at compute, and may leave; by turn
        self._leaving: dict[int, PartedStorage] = {}
        self._absent: dict[int, PartedStorage] = {}  # offloaded, no room taken at compute yet
        self._coming: dict[int, PartedStorage] = {}  # room taken, but not all parts copied in
        self._fetches: dict[int, list[int]] = {}  # tickets
        self._waits: list[int] = []  # tickets of ``Saved`` that wait for room at compute
        # Storages with a turn up to the border were saved before the current unit began.
        self._turn = self._border = 0
        self._granted = -1  # the storage granted last, which backward may not have used yet
        self.moving = 0  # moves in progress
        self._ending = 0  # dropped storages that are removed once their moves have ended
        self._full = False  # host memory had no free slot, and no move has ended since
        self._returning = False
        self._leaving_bytes = self._away_bytes = self._writing_bytes = 0
        self._disk_bytes = self._all_bytes = 0
        self.beside_bytes = 0  # at compute, not reported by ``Saved``
        self._expected = 0  # saved bytes when the last backward began

    # -- questions ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """The bytes at compute, offloaded, and on disk."""
        here = self._tally.used_bytes + self.beside_bytes
        return here, self._away_bytes, self._disk_bytes

    def tickets(self) -> list[int]:
        """Return the tickets that are neither granted nor refused yet."""
        return [*self._waits, *(t for tickets in self._fetches.values() for t in tickets)]

    def forget_waiting(self) -> None:
        """Drop the waiting tickets: their callers were notified in another way."""
        self._waits.clear()
        self._fetches.clear()

    @property
    def _compute_room(self) -> int:
        return room_beside(self._whole_room, self._largest)

    # -- signals --------------------------------------------------------------------------------

    def saved(self, signal: Saved) -> None:
        """Record that autograd saved storages, or saved known ones again."""
        for number, nbytes, unit, itemsize in signal.items:
            storage = self._saved.get(number)
            if storage is None:
                sizes = self._room.part_sizes(nbytes)
                storage = PartedStorage(number, sizes, unit, itemsize)
                self._present[number] = self._saved[number] = storage
                for part in storage.parts:
                    self._items.add(part)
                    self._items.take(part, Tier.DEVICE, valid=True)
                self._all_bytes += storage.nbytes
                self._largest = max(self._largest, storage.nbytes)
            self._turn += 1
            storage.turn = self._turn
            if self._present.pop(number, None) is not None:
                self._present[number] = storage
        if signal.unit is not None:
            self._border = self._turn
        if signal.ticket is not None:
            self._waits.append(signal.ticket)

    def fetch(self, signal: Fetch) -> None:
        """Record that backward waits for a storage; cancel its offload if that is in progress."""
        storage = self._saved[signal.number]
        self._fetches.setdefault(signal.number, []).append(signal.ticket)
        storage.wanted = storage.leaving
        if storage.wanted and not storage.copying:
            self._stay(storage)

    def used(self, signal: SavedDropped) -> None:
        """Remove storages that nothing needs any more, once their moves have ended."""
        self._full = False
        for number in signal.numbers:
            storage = self._saved.get(number)
            if storage is None:  # the thread that would have reported it was interrupted
                continue
            storage.used = True
            for ticket in self._fetches.pop(number, ()):  # the waiting thread was interrupted
                self._emit(Grant(ticket))
            for where in (self._present, self._coming, self._absent):
                where.pop(number, None)  # nothing may bring it back while its moves end
            self._end_leaving(storage)
            if storage.moving:
                self._ending += 1
            else:
                self._remove(storage)

    def turn(self, signal: BackwardPhase) -> None:
        """Record that a backward begins or has ended, and update the room at compute."""
        self._returning, self.beside_bytes = signal.backward, signal.beside
        if signal.room is not None:
            self._whole_room = signal.room
        if signal.backward:
            self._expected = self._all_bytes
            self._border = self._turn

    def _remove(self, storage: PartedStorage) -> None:
        if not storage.here:
            self._away_bytes -= storage.nbytes
        if storage.on_disk:
            self._disk_bytes -= storage.below_bytes
        self._all_bytes -= storage.nbytes
        del self._saved[storage.number]
        for part in storage.parts:
            self._items.remove(part)
            self._emit(FreeItem(part.key))

    # -- the policy of the kind -----------------------------------------------------------------

    def next_use(self, item: Item, tier: Tier) -> int:
        return self._turn - self._saved[item.key.number].turn

    def may_go(self, item: Item, tier: Tier) -> bool:
        return True

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        return item.key.number in spare

    def moved(self, item: Item, work: Move) -> None:
        storage = self._saved[item.key.number]
        self._full = False
        self.moving -= 1
        storage.moving -= 1
        if isinstance(work, CopyOut):
            storage.copying -= 1
        elif isinstance(work, Write):
            self._writing_bytes -= item.nbytes
        if storage.used:
            if not storage.moving:
                self._ending -= 1
                self._remove(storage)
        elif isinstance(work, CopyOut):
            self._copied_out(storage, item)
        elif isinstance(work, Write):
            self._written(storage, item)
        elif not isinstance(work, Read):
            self._arrived(storage, item)

    def _copied_out(self, storage: PartedStorage, part: Item) -> None:
        if storage.wanted:
            if not storage.copying:
                self._stay(storage)
            return
        if storage.streams:
            self._write(storage, part)
        self._go_on(storage)

    def _written(self, storage: PartedStorage, part: Item) -> None:
        """Free the part's host slot, unless backward needs the part soon."""
        assert part.host is not None
        if storage.here:
            idle = part.device is not None and part.device.valid
        else:
            idle = storage.streams and not self._returning
        if idle and not part.host.holds:
            self._items.drop(part, Tier.HOST)

    def _arrived(self, storage: PartedStorage, part: Item) -> None:
        assert part.host is not None
        if not part.host.holds:  # compute has a copy now
            self._items.discard(part, Tier.HOST)
        if storage.complete and storage.arrived:
            self._present[storage.number] = storage

    # -- offload --------------------------------------------------------------------------------

    def _end_leaving(self, storage: PartedStorage) -> None:
        """Remove a storage from the leaving ones."""
        if storage.leaving:
            storage.leaving = storage.wanted = False
            self._leaving_bytes -= storage.nbytes
            del self._leaving[storage.number]

    def _stay(self, storage: PartedStorage) -> None:
        """Keep a storage that was leaving, since compute wants it; drop the copies made so far."""
        self._end_leaving(storage)
        self._present[storage.number] = storage
        for part in storage.parts:
            if part.host is not None and not part.host.holds:
                self._items.discard(part, Tier.HOST)

    def _let_go(self, storage: PartedStorage) -> None:
        """Free compute's copy; every part has another copy."""
        self._end_leaving(storage)
        for part in storage.parts:
            self._items.discard(part, Tier.DEVICE)
        storage.here, storage.pending = False, list(storage.parts)
        self._absent[storage.number] = storage
        self._away_bytes += storage.nbytes
        self._emit(FreeDeviceCopy(storage.parts[0].key))

    def _excess(self) -> int:
        """Return the bytes to offload from compute's memory: the excess over its room, and in
        forward also the excess expected later."""
        room, used = self._compute_room, self._tally.used_bytes - self._leaving_bytes
        over = used - room
        if self._returning:
            return over
        if not self._expected:
            over = max(over, used - int(FIRST_SHARE * room))
        coming = max(self._expected, self._all_bytes)
        return max(over, coming - room - self._away_bytes - self._leaving_bytes)

    def _relieve(self) -> None:
        """Offload what must leave, or should leave soon."""
        for storage in list(self._leaving.values()):
            if not self._go_on(storage):
                return
        if self._excess() <= 0 and not self._leaves_at_once:
            return
        # Offload first what is needed last.  Skip the storage just granted, and requested ones.
        for storage in list(self._present.values()):
            if storage.number == self._granted or storage.number in self._fetches:
                continue
            past = storage.turn <= self._border and not self._returning
            if not (self._leaves_at_once and past) and self._excess() <= 0:
                return
            if not self._leave(storage) and self.moving:
                return  # wait for the moves; if nothing moves, try the next, maybe smaller, storage

    def _shortage(self) -> tuple[Tier, int, int]:
        """Return the full tier, and the bytes needed and available there: the tier below compute if
        a storage could leave, else compute's own."""
        mine = self._present.items()
        leaves = (s for n, s in mine if n != self._granted and n not in self._fetches)
        first = next(leaves, None)
        if first is not None and self._room.disk and not self._may_write(first):
            return Tier.NVME, first.below_bytes, max(0, self._room.disk - self._disk_bytes)
        if first is not None and self._has_device and not self._room.disk:
            return Tier.HOST, first.below_bytes, self._host.nbytes - self._host.used_bytes
        # Saves are reported in chunks, so keep room for one more storage as large as the largest.
        return Tier.DEVICE, self._tally.used_bytes + self._largest, self._whole_room

    def _leave(self, storage: PartedStorage) -> bool:
        """Start to offload a storage.  Return ``False`` if there is no room for it (yet)."""
        missing = storage.missing_bytes
        storage.streams = self._through or missing > self._host.nbytes
        if missing and not storage.streams and not self._take_slots(storage):
            # Host memory is full of storages that are needed sooner: stream this one to disk.
            storage.streams = not self.moving
            if not storage.streams:
                return False
        if missing and storage.streams:
            if not self._host.nbytes or not self._may_write(storage):
                return False
            self._take_disk(storage)
        del self._present[storage.number]
        storage.leaving, storage.out = True, 0
        self._leaving[storage.number] = storage
        self._leaving_bytes += storage.nbytes
        return self._go_on(storage)

    def _go_on(self, storage: PartedStorage) -> bool:
        """Copy out the parts that have room below.  Return ``False`` if some have none yet."""
        while storage.out < len(storage.parts) and not storage.wanted:
            part = storage.parts[storage.out]
            if not is_below(part):
                stuck = storage.streams and not self.moving
                if part.host is None and not self._host_room(part, urgent=stuck):
                    return False
                storage.copying += 1
                storage.moving += 1
                self.moving += 1
                self._items.copy_out(part)
            storage.out += 1
        if storage.out == len(storage.parts) and not storage.copying and not storage.wanted:
            self._let_go(storage)
        return True

    def _take_slots(self, storage: PartedStorage) -> bool:
        """Give a host slot to every part that needs one, or to none of them."""
        taken: list[Item] = []
        for part in storage.parts:
            if part.host is None and not part.stored:
                if not self._host_room(part):
                    for other in taken:
                        self._items.discard(other, Tier.HOST)
                    return False
                taken.append(part)
        return True

    def _host_room(self, part: Item, *, urgent: bool = False) -> bool:
        """Give the part a slot in host memory, or start to make room for one.

        If ``urgent``, or if compute waits for the part, evict any copy that is also on disk.
        Return whether the part has a slot now.
        """
        urgent = urgent or part.key.number in self._fetches
        if self._full and not urgent:
            return False  # nothing has changed since the last attempt
        if part.nbytes > self._host.nbytes:
            return False
        distance = -1 if urgent else self.next_use(part, Tier.HOST)
        # Keep parts read ahead for a waiting storage: evicting them means reading them again.
        if self._items.make_room(part, Tier.HOST, distance, spare=self._fetches) is not None:
            return True
        self._full = True
        if not self._through:  # otherwise, everything there is written or about to be written
            self._write_others(part.nbytes)
        return False

    def _write_others(self, nbytes: int) -> None:
        """Start to write parts that are only in host memory, about ``nbytes`` in total."""
        for storage in chain(self._absent.values(), self._leaving.values()):
            for part in storage.parts if self._may_write(storage) else ():
                if self._writing_bytes >= nbytes:
                    return
                if is_in_host_alone(part):
                    self._write(storage, part)

    def _may_write(self, storage: PartedStorage) -> bool:
        free = self._room.disk - self._disk_bytes
        return storage.on_disk or storage.below_bytes <= free

    def _take_disk(self, storage: PartedStorage) -> None:
        if not storage.on_disk:
            storage.on_disk = True
            self._disk_bytes += storage.below_bytes

    def _write(self, storage: PartedStorage, part: Item) -> None:
        self._take_disk(storage)
        self._writing_bytes += part.nbytes
        storage.moving += 1
        self.moving += 1
        self._items.write(part)

    # -- reload ---------------------------------------------------------------------------------

    def _bring(self, storage: PartedStorage, *, urgent: bool) -> bool:
        """Move a storage towards compute.  Return ``False`` if not all of it has room yet."""
        if storage.complete:
            return True
        room = storage.here or self._has_room(storage, urgent=urgent)
        if not room and not urgent:
            return False
        asked = self._read(storage, urgent=urgent)
        if room and not storage.here and any(part.host is not None for part in storage.parts):
            self._take_room(storage)
        if storage.here:
            self._copy_in(storage)
        return asked and storage.here

    def _has_room(self, storage: PartedStorage, *, urgent: bool) -> bool:
        """Return whether a storage may be reloaded now.  An urgent one may exceed the room once no
        move in progress can free any: on a device, the caller is far ahead of the copies."""
        room = self._whole_room if urgent else self._compute_room
        if self._tally.used_bytes + storage.nbytes <= room:
            return True
        return urgent and not self._ending and not (self._leaving and self.moving)

    def _take_room(self, storage: PartedStorage) -> None:
        del self._absent[storage.number]
        self._away_bytes -= storage.nbytes
        for part in storage.parts:
            self._items.take(part, Tier.DEVICE, valid=False)
        storage.here = True
        self._coming[storage.number] = storage

    def _read(self, storage: PartedStorage, *, urgent: bool) -> bool:
        """Read pending parts into host memory.  Return ``False`` if some have no room yet."""
        for part in storage.pending:
            if part.host is None:
                if not self._host_room(part):
                    return False
                storage.moving += 1
                self.moving += 1
                self._items.read(part, urgent=urgent)
        return True

    def _copy_in(self, storage: PartedStorage) -> None:
        """Copy in the pending parts that are in host memory."""
        pending, storage.pending = storage.pending, []
        for part in pending:
            if part.host is None or not part.host.valid:
                storage.pending.append(part)
            else:
                storage.moving += 1
                self.moving += 1
                self._items.copy_in(part)
        if not storage.pending:
            del self._coming[storage.number]

    def _has(self, storage: PartedStorage) -> bool:
        """Return whether compute may use a storage.  A device's stream waits for running copies."""
        return storage.complete and (self._has_device or storage.arrived)

    def _serve(self) -> None:
        for number in list(self._fetches):
            storage = self._saved[number]
            self._bring(storage, urgent=True)
            if self._has(storage):
                self._granted = number
                for ticket in self._fetches.pop(number):
                    self._emit(Grant(ticket))
        for storage in list(self._coming.values()):
            self._bring(storage, urgent=storage.number in self._fetches)

    def prefetch(self) -> None:
        """During backward, reload the storages that it needs next, as far as there is room."""
        if not self._returning or not self._absent:
            return
        soonest = [
            each for each, _ in zip(reversed(self._absent.values()), range(AT_ONCE), strict=False)
        ]
        for storage in soonest:
            if not self._bring(storage, urgent=False):
                return

    # -- progress -------------------------------------------------------------------------------

    def advance(self) -> None:
        """Serve fetches, offload what is over the room, and grant saves that are within it."""
        if self._saved:
            self._serve()
            self._relieve()
        if self._waits and self._tally.used_bytes <= self._compute_room:
            for ticket in self._waits:
                self._emit(Grant(ticket))
            self._waits.clear()

    def give_up(self) -> None:
        """Resolve a standstill: refuse saves that wait for room, and reload storages over the
        budget.  Refuse fetches that are still blocked.  Call it only while nothing moves."""
        for ticket in self._waits:
            newest = next(reversed(self._saved.values()))
            self._emit(Refuse(ticket, newest.parts[0].key, *self._shortage(), newest.unit))
        self._waits.clear()
        for number in list(self._fetches):
            # The host slots may be full of parts that have no other copy: copy those in first.
            self._full = False
            for other in [*self._coming.values(), *self._absent.values()]:
                if any(part.host is not None for part in other.pending):
                    self._bring(other, urgent=True)
            if not self.moving:
                storage = self._saved[number]
                for ticket in self._fetches.pop(number):
                    self._emit(Refuse(ticket, storage.parts[0].key, Tier.HOST, storage.below_bytes,
                                      self._host.nbytes, storage.unit))  # fmt: skip
