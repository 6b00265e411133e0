"""The policy of activations: what is needed last leaves first, and comes back before it is needed.

Backward needs first what was saved last.  So what autograd saves is kept in the order in which it
was saved (the *turn* of an item); what has to leave is taken from the front, what comes back from
the end.  Compute's memory is not the engine's own: here it is counted, and may be overdrawn, since
what is saved is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from ..facts.tier import Tier
from .items import Item, Items, Move
from .layout import Layout
from .messages import (
    CopyOut,
    Fetch,
    Forget,
    Grant,
    Instruction,
    Key,
    Kind,
    LetGo,
    Read,
    Refuse,
    Saved,
    Turn,
    Used,
    Write,
)
from .units import PAGE, align

LEAST_BYTES = 1 << 20  # smaller storages stay: a move of each costs more than it frees
FIRST_SHARE = 0.75  # of the room, from which on things leave while nobody knows what will come
AT_ONCE = 32  # items that a signal looks at, to bring them back


def room_beside(room: int, largest: int) -> int:
    """Of a room, what may be full when one more comes, which is there before anyone is told."""
    return max(room - largest, room // 4)


class SavedItem(Item):
    """One storage that autograd saved.

    ``turn`` grows with every time that anything is saved.  ``leaving``: its copy out is under way;
    ``wanted``: compute has it again, or asks for it, and it stays when that is over; ``on_disk``:
    it has room there; ``used``: it is needed no more, and goes when nothing moves it.
    """

    __slots__ = ("leaving", "on_disk", "turn", "unit", "used", "wanted")

    def __init__(self, number: int, nbytes: int, unit: int) -> None:
        super().__init__(Key(Kind.SAVED, number), align(nbytes, PAGE))
        self.unit, self.turn = unit, 0
        self.leaving = self.on_disk = self.used = self.wanted = False

    @property
    def moves(self) -> bool:
        return any(copy is not None and copy.holds for copy in (self.device, self.host))


class Activations:
    """What autograd saved, where it is, and who waits for it."""

    def __init__(self, layout: Layout, items: Items, emit: Callable[[Instruction], None]) -> None:
        self._items, self._emit, self._room = items, emit, layout.saved
        self._has_device, self._whole_room = layout.has_device, layout.saved.compute
        self._largest = 0  # item until now
        items.govern(Kind.SAVED, self)
        self._tally = items.arena(Kind.SAVED, Tier.DEVICE)
        named = self._room.policy in ("host", "nvme")
        self._leaves_at_once = named and (layout.has_device or self._room.policy == "nvme")
        # Where host memory is not a tier below compute's, what is in it is on its way to disk.
        self._through = self._room.policy == "nvme" or not layout.has_device
        self._saved: dict[int, SavedItem] = {}
        self._present: dict[int, SavedItem] = {}  # with compute, and may leave; by turn
        self._absent: dict[int, SavedItem] = {}  # not with compute, nor on the way there
        self._fetches: dict[int, list[int]] = {}  # tickets
        self._waits: list[int] = []  # tickets of who has saved too much
        # What was saved before the border is not of the unit that runs.
        self._turn = self._border = 0
        self._granted = -1  # what backward was last given, and may not have taken yet
        self.moving = 0  # moves that are under way
        self._ending = 0  # items that are needed no more, and go when their moves are over
        self._full = False  # there was no slot in host memory, and no move has ended since
        self._returning = False
        self._leaving_bytes = self._away_bytes = self._writing_bytes = 0
        self._disk_bytes = self._all_bytes = 0
        self.beside_bytes = 0  # with compute, that nobody tells of
        self._expected = 0  # bytes that were saved when the last backward began

    # -- questions ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Bytes with compute, not there, and on disk."""
        here = self._tally.used_bytes + self.beside_bytes
        return here, self._away_bytes, self._disk_bytes

    def tickets(self) -> list[int]:
        """Of all who wait."""
        return [*self._waits, *(t for tickets in self._fetches.values() for t in tickets)]

    def forget_waiting(self) -> None:
        """Whoever waits was told otherwise."""
        self._waits.clear()
        self._fetches.clear()

    @property
    def _compute_room(self) -> int:
        return room_beside(self._whole_room, self._largest)

    # -- signals --------------------------------------------------------------------------------

    def saved(self, signal: Saved) -> None:
        """Autograd has saved something, maybe again."""
        for number, nbytes, unit in signal.items:
            item = self._saved.get(number)
            if item is None:
                item = self._present[number] = self._saved[number] = SavedItem(number, nbytes, unit)
                self._items.add(item)
                self._items.take(item, Tier.DEVICE, valid=True)
                self._all_bytes += item.nbytes
                self._largest = max(self._largest, item.nbytes)
            self._turn += 1
            item.turn = self._turn
            if self._present.pop(number, None) is not None:
                self._present[number] = item
        if signal.unit is not None:
            self._border = self._turn
        if signal.ticket is not None:
            self._waits.append(signal.ticket)

    def fetch(self, signal: Fetch) -> None:
        """Backward is at this item."""
        item = self._saved[signal.number]
        self._fetches.setdefault(signal.number, []).append(signal.ticket)
        item.wanted = item.leaving

    def used(self, signal: Used) -> None:
        """These are needed no more."""
        self._full = False
        for number in signal.numbers:
            item = self._saved.get(number)
            if item is None:  # who was about to tell of it was interrupted
                continue
            item.used = True
            self._present.pop(number, None)
            if item.moves:
                self._ending += 1
            else:
                self._remove(item)

    def turn(self, signal: Turn) -> None:
        """A backward begins, or has ended."""
        self._returning, self.beside_bytes = signal.backward, signal.beside
        if signal.room is not None:
            self._whole_room = signal.room
        if signal.backward:
            self._expected = self._all_bytes
            self._border = self._turn

    def _remove(self, item: SavedItem) -> None:
        number = item.key.number
        if item.device is None:
            self._away_bytes -= item.nbytes
        if item.on_disk:
            self._disk_bytes -= item.nbytes
        self._all_bytes -= item.nbytes
        self._absent.pop(number, None)
        del self._saved[number]
        self._items.remove(item)
        self._emit(Forget(item.key))

    # -- the policy of the kind -----------------------------------------------------------------

    def next_use(self, item: Item, tier: Tier) -> int:
        assert isinstance(item, SavedItem)
        return self._turn - item.turn

    def may_go(self, item: Item, tier: Tier) -> bool:
        return True

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        return item.key.number in spare

    def moved(self, item: Item, work: Move) -> None:
        assert isinstance(item, SavedItem)
        self._full = False
        self.moving -= 1
        if isinstance(work, CopyOut):
            item.leaving = False
            self._leaving_bytes -= item.nbytes
        elif isinstance(work, Write):
            self._writing_bytes -= item.nbytes
        if item.used:
            if not item.moves:
                self._ending -= 1
                self._remove(item)
        elif isinstance(work, CopyOut):
            self._copied_out(item)
        elif isinstance(work, Write):
            if self._through and not self._returning and item.device is None:
                self._items.drop(item, Tier.HOST)
        elif not isinstance(work, Read):
            self._arrived(item)

    def _copied_out(self, item: SavedItem) -> None:
        if item.wanted:
            item.wanted = False
            self._present[item.key.number] = item
            return
        self._let_go(item)
        if self._through and not self._returning:
            self._write(item)

    def _arrived(self, item: SavedItem) -> None:
        self._present[item.key.number] = item
        assert item.host is not None
        if not item.host.holds:  # with compute it is as good as here
            self._items.discard(item, Tier.HOST)

    # -- away -----------------------------------------------------------------------------------

    def _let_go(self, item: SavedItem) -> None:
        """Compute's copy goes; there is another."""
        self._items.discard(item, Tier.DEVICE)
        self._absent[item.key.number] = item
        self._away_bytes += item.nbytes
        self._emit(LetGo(item.key))

    def _excess(self) -> int:
        """Bytes that must leave compute's memory, or had better while there is time."""
        room, used = self._compute_room, self._tally.used_bytes - self._leaving_bytes
        over = used - room
        if self._returning:
            return over
        if not self._expected:
            over = max(over, used - int(FIRST_SHARE * room))
        coming = max(self._expected, self._all_bytes)
        return max(over, coming - room - self._away_bytes - self._leaving_bytes)

    def _relieve(self) -> None:
        """Has leave what should."""
        while (item := self._first()) is not None:
            past = item.turn <= self._border and not self._returning
            if not (self._leaves_at_once and past) and self._excess() <= 0:
                return
            if not self._leave(item):
                return

    def _first(self) -> SavedItem | None:
        """What is needed last of all that may leave; not what was just granted, or is asked for."""
        for number, item in self._present.items():
            if number != self._granted and number not in self._fetches:
                return item
        return None

    def _leave(self, item: SavedItem) -> bool:
        """Starts to move an item out of compute's memory.  ``False``: there is no room, or not
        yet."""
        if item.stored or (item.host is not None and item.host.valid):
            del self._present[item.key.number]
            self._let_go(item)
            return True
        if self._through and not self._may_write(item):
            return False
        if not self._host_room(item):
            return False
        if self._through:
            self._take_disk(item)
        del self._present[item.key.number]
        item.leaving = True
        self._leaving_bytes += item.nbytes
        self.moving += 1
        self._items.copy_out(item)
        return True

    def _host_room(self, item: SavedItem) -> bool:
        """Gives the item a slot in host memory, or starts to make room for one."""
        urgent = item.key.number in self._fetches
        if self._full and not urgent:
            return False  # and nothing has changed since
        if item.nbytes > self._items.arena(Kind.SAVED, Tier.HOST).nbytes:
            return False
        distance = -1 if urgent else self.next_use(item, Tier.HOST)
        if self._items.make_room(item, Tier.HOST, distance) is not None:
            return True
        for other in self._absent.values():
            if self._writing_bytes >= item.nbytes:
                break
            if self._alone_in_host(other) and self._may_write(other):
                self._write(other)
        self._full = True
        return False

    def _alone_in_host(self, item: SavedItem) -> bool:
        """Whether an item is in host memory, at rest, and nowhere else."""
        copy = item.host
        return copy is not None and copy.valid and not copy.holds and not item.stored

    def _may_write(self, item: SavedItem) -> bool:
        free = self._room.disk - self._disk_bytes
        return item.on_disk or item.nbytes <= free

    def _take_disk(self, item: SavedItem) -> None:
        if not item.on_disk:
            item.on_disk = True
            self._disk_bytes += item.nbytes

    def _write(self, item: SavedItem) -> None:
        self._take_disk(item)
        self._writing_bytes += item.nbytes
        self.moving += 1
        self._items.write(item)

    # -- back -----------------------------------------------------------------------------------

    def _bring(self, item: SavedItem, *, urgent: bool) -> bool:
        """Brings an item closer to compute.  ``False``: there is no room yet."""
        if item.device is not None:
            return True
        if item.host is None:
            if not self._host_room(item):
                return False
            self.moving += 1
            self._items.read(item, urgent=urgent)
            return True
        if not item.host.valid:
            return True
        room = self._whole_room if urgent else self._compute_room
        # On a device who asks is far ahead of the copies: what is under way may yet make room.
        if self._tally.used_bytes + item.nbytes > room and (
            not urgent or self._ending or self._leaving_bytes
        ):
            return False
        del self._absent[item.key.number]
        self._away_bytes -= item.nbytes
        self._items.take(item, Tier.DEVICE, valid=False)
        self.moving += 1
        self._items.copy_in(item)
        return True

    def _has(self, item: SavedItem) -> bool:
        """Whether compute may go on with the item; on a device its stream waits for the copy."""
        return item.device is not None and (self._has_device or item.device.valid)

    def _serve(self) -> None:
        for number in list(self._fetches):
            item = self._saved[number]
            self._bring(item, urgent=True)
            if self._has(item):
                self._granted = number
                for ticket in self._fetches.pop(number):
                    self._emit(Grant(ticket))

    def prefetch(self) -> None:
        """While a backward runs, brings back what it needs next, as far as there is room."""
        if not self._returning or not self._absent:
            return
        room = self._compute_room - self._tally.used_bytes
        soonest = [
            item for item, _ in zip(reversed(self._absent.values()), range(AT_ONCE), strict=False)
        ]
        for item in soonest:
            room -= item.nbytes
            if room < 0 or not self._bring(item, urgent=False):
                return

    # -- progress -------------------------------------------------------------------------------

    def advance(self) -> None:
        """What has to leave leaves; who waits is granted what has come."""
        if self._saved:
            self._serve()
            self._relieve()
        if self._waits and self._tally.used_bytes <= self._compute_room:
            for ticket in self._waits:
                self._emit(Grant(ticket))
            self._waits.clear()

    def give_up(self) -> None:
        """Nothing moves: who waits for room will not get it; who waits for an item gets it at the
        cost of what stays beside it."""
        for ticket in self._waits:
            newest = next(reversed(self._saved.values()))
            used, room = self._tally.used_bytes, self._compute_room
            self._emit(Refuse(ticket, newest.key, Tier.DEVICE, used, room, newest.unit))
        self._waits.clear()
        for number in list(self._fetches):
            # Its slot to be read into is taken by what has no other copy: that goes to compute.
            held = [i for i in self._absent.values() if i.host is not None and i.host.valid]
            for other in held:
                self._bring(other, urgent=True)
            if not held:
                item = self._saved[number]
                nbytes = self._items.arena(Kind.SAVED, Tier.HOST).nbytes
                for ticket in self._fetches.pop(number):
                    refused = Refuse(ticket, item.key, Tier.HOST, item.nbytes, nbytes, item.unit)
                    self._emit(refused)
