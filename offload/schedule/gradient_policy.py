"""The policy for gradients, from where compute gathers them to where they wait for the update."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Container

from ..facts.tier import Tier
from .arena import Place
from .items import Copy, Item, Items, Move
from .layout import Layout
from .messages import (
    Accumulate,
    CopyOut,
    GradientStored,
    GradReady,
    GradRoom,
    Grant,
    Instruction,
    Key,
    Kind,
    Write,
)
from .order import NEVER

# Note [Path of gradients]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# The gradients of a unit pass through these phases, one arrival (micro-step) at a time:
#
# 1. ``GradRoom`` asks for a place to gather them in.  If their home is in compute's memory and
#    idle, it is granted at once (``_home``).  Else, on a device a ``GATHERED`` item gets a slot
#    there, and without a device the host slot is granted (GATHERING).  If earlier gradients of the
#    step are on disk, they are first read back into that slot (READING).
# 2. ``GradReady`` hands them over (ARRIVING).  If they were gathered in a ``GATHERED`` slot, they
#    are copied out to host memory: directly to the unit's host slot, or to a second slot if they
#    must still be merged or converted.  Earlier ones on disk are read first (READING).
# 3. ``Accumulate`` adds or converts them into the unit's slot.
# 4. They rest in memory (HELD), or are written to disk (WRITING, STORED).
# 5. For the update, stored ones are read to host memory (READING, HELD).  ``consumed`` then sets
#    STORED again, or EMPTY if they have no home; those with a home in memory stay HELD.
#
# Gradients are never evicted.  Requests wait until room is free, in order.  An arrival takes all
# the slots that it needs or none, so that waiting requests do not block each other.


class Phase(enum.Enum):
    """The state of a unit's gradients.  See Note [Path of gradients]."""

    EMPTY = "empty"
    GATHERING = "gathering"  # compute fills the slot that it was granted
    ARRIVING = "arriving"  # being copied out, merged or converted
    WRITING = "writing"  # to disk
    HELD = "held"  # in host or device memory, ready for the update
    STORED = "stored"  # on disk, ready to be read for the update
    READING = "reading"  # from disk, for a merge or for the update


_REST = (Phase.EMPTY, Phase.HELD, Phase.STORED)


class UnitGradients(Item):
    """The gradients of one unit, as the update reads them.

    Attributes:
        phase: see Note [Path of gradients].
        rested: the phase before the current arrival.
        gathered: the item of the gradients that arrive now.  It has a slot on the device, and one
            in host memory if they must be merged or converted.
        arrival: the signal that a read from disk serves; ``None``: the read is for the update.
    """

    __slots__ = ("arrival", "gathered", "phase", "rested")

    def __init__(self, unit: int, nbytes: int) -> None:
        super().__init__(Key(Kind.GRADS, unit), nbytes)
        self.phase = self.rested = Phase.EMPTY
        self.gathered: Item | None = None
        self.arrival: GradReady | GradRoom | None = None


class Gradients:
    """The gradients of all units.

    Each unit has one arrival at a time, independently of the others.  Gradients are never evicted,
    so requests wait for room.  See Note [Path of gradients].
    """

    def __init__(
        self, layout: Layout, updating: Container[int], items: Items,
        emit: Callable[[Instruction], None],
    ) -> None:  # fmt: skip
        self.layout, self._updating, self._items, self._emit = layout, updating, items, emit
        items.govern(Kind.GRADS, self)
        items.govern(Kind.GATHERED, self)
        self.units: list[UnitGradients] = []
        for unit, home in enumerate(layout.homes):
            item = UnitGradients(unit, layout.grad_bytes[unit])
            if home.grad_place is not None:
                item.fix(home.grad_place)
            items.add(item)
            self.units.append(item)
        self.room_wanted: deque[GradRoom] = deque()
        self.arrivals: deque[GradReady] = deque()

    # -- questions ------------------------------------------------------------------------------

    def held(self, unit: int) -> bool:
        """Return whether the update can read a unit's gradients."""
        return self.units[unit].phase is Phase.HELD

    def stored(self, unit: int) -> bool:
        """Return whether a unit's gradients wait on disk."""
        return self.units[unit].phase is Phase.STORED

    def slot(self, unit: int) -> Place:
        """Return where the update reads a unit's gradients."""
        copy = self._slot(unit)
        assert copy is not None
        return copy.place

    @property
    def moving(self) -> bool:
        """Whether gradients are still on their way to where they rest."""
        return bool(self.arrivals) or any(u.phase not in _REST for u in self.units)

    def _home(self, unit: int) -> Place | None:
        """Return the home of a unit's gradients if compute may gather in it now.

        ``None`` if the home is in another tier, or if the gradients are moving or being read.
        """
        item, home = self.units[unit], self.layout.homes[unit]
        if home.grads is not self.layout.compute_tier or unit in self._updating:
            return None
        return home.grad_place if item.phase in _REST else None

    def tell_home(self, unit: int) -> None:
        """Report whether compute may gather in the home of the unit's gradients."""
        if self.layout.homes[unit].grads is self.layout.compute_tier:
            self._emit(GradientStored(unit, self._home(unit) is not None))

    def _slot(self, unit: int) -> Copy | None:
        item = self.units[unit]
        return item.device if self.layout.homes[unit].grads is Tier.DEVICE else item.host

    def _host_slot(self, item: UnitGradients) -> bool:
        """Allocate a host slot for the unit unless it has one; return whether it has one now."""
        return item.host is not None or self._items.make_room(item, Tier.HOST) is not None

    def _free_slot(self, item: UnitGradients) -> None:
        if item.host is not None and not item.host.fixed:
            self._items.discard(item, Tier.HOST)

    # -- the policy of the kind -----------------------------------------------------------------

    def next_use(self, item: Item, tier: Tier) -> int:
        return NEVER

    def may_go(self, item: Item, tier: Tier) -> bool:
        return False

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        return True

    def moved(self, item: Item, work: Move) -> None:
        grads = self.units[item.key.number]
        if isinstance(work, CopyOut):
            self._copied_out(grads)
        elif isinstance(work, Write):
            self._free_slot(grads)
            grads.phase = Phase.STORED
        else:
            self._read(grads)

    # -- room for compute to gather in ------------------------------------------------------------

    def advance(self) -> None:
        """Serve arrivals, then requests for room, each in order and as far as room allows."""
        while self.arrivals and self._arrive(self.arrivals[0]):
            self.arrivals.popleft()
        while self.room_wanted and self._serve(self.room_wanted[0]):
            self.room_wanted.popleft()

    def _serve(self, wish: GradRoom) -> bool:
        item, home = self.units[wish.unit], self._home(wish.unit)
        if home is not None:
            self._emit(Grant(wish.ticket, (home,)))
            return True
        if item.phase not in _REST or item.gathered is not None or wish.unit in self._updating:
            return False
        if self.layout.has_device:
            return self._gather(item, wish)
        if not self._host_slot(item):
            return False
        if wish.merge and item.phase is Phase.STORED:
            item.phase, item.arrival = Phase.READING, wish
            self._items.read(item, urgent=True)
            return True
        item.phase = Phase.GATHERING
        self._emit(Grant(wish.ticket, (self.slot(wish.unit),)))
        return True

    def _gather(self, item: UnitGradients, wish: GradRoom) -> bool:
        """Grant a slot on the device; return ``False`` if there is none."""
        size = self.layout.units[wish.unit].grad_bytes
        gathered = Item(Key(Kind.GATHERED, wish.unit), size)
        copy = self._items.make_room(gathered, Tier.DEVICE)
        if copy is None:
            return False
        self._items.add(gathered)
        item.gathered = gathered
        self._emit(Grant(wish.ticket, (copy.place,)))
        return True

    def lost(self, unit: int) -> None:
        """Free the place that compute was granted and will not fill.

        Does nothing if the gradients were handed over since, or if no place was granted.
        """
        item = self.units[unit]
        if item.phase is Phase.GATHERING:
            self._free_slot(item)
            item.phase = Phase.EMPTY
        elif item.phase in _REST and item.gathered is not None:
            self._forget_gathered(item)

    def _forget_gathered(self, item: UnitGradients) -> None:
        if item.gathered is not None:
            self._items.remove(item.gathered)
            item.gathered = None

    # -- arrival --------------------------------------------------------------------------------

    def ready(self, signal: GradReady) -> None:
        """Take over gradients that compute has gathered."""
        item = self.units[signal.unit]
        home = self.layout.homes[signal.unit]
        if home.grads is Tier.DEVICE or not self.layout.has_device:
            item.phase = Phase.ARRIVING  # gathered where they are kept: nothing to copy
            if signal.in_place:
                self.accumulated(signal.unit)
            else:
                self.tell_home(signal.unit)
                slot = self.slot(signal.unit)
                self._emit(Accumulate(signal.unit, slot, slot))
        else:
            item.rested, item.phase = item.phase, Phase.ARRIVING
            self.arrivals.append(signal)

    def _arrive(self, signal: GradReady) -> bool:
        """Start to copy gathered gradients to host memory; return ``False`` without room."""
        item = self.units[signal.unit]
        gathered = item.gathered
        assert gathered is not None
        if not self._host_slot(item):
            return False
        if (signal.merge or self.layout.converts[signal.unit]) and (
            self._items.make_room(gathered, Tier.HOST) is None
        ):
            self._free_slot(item)  # both or none: a waiting arrival must not hold room
            return False
        if signal.merge and item.rested is Phase.STORED:
            item.phase, item.arrival = Phase.READING, signal
            self._items.read(item, urgent=True)
        else:
            self._copy_out(item)
        return True

    def _copy_out(self, item: UnitGradients) -> None:
        """Copy gathered gradients to their own host slot if they must be merged or converted, else
        to the unit's host slot."""
        gathered = item.gathered
        assert gathered is not None and item.host is not None
        self._items.copy_out(gathered, None if gathered.host is not None else item.host.place)

    def _copied_out(self, item: UnitGradients) -> None:
        gathered, unit = item.gathered, item.key.number
        assert gathered is not None and item.host is not None
        self._items.discard(gathered, Tier.DEVICE)
        source = item.host if gathered.host is None else gathered.host
        if gathered.host is None:
            self._forget_gathered(item)
        self._emit(Accumulate(unit, source.place, item.host.place))

    def accumulated(self, unit: int) -> None:
        """Handle the end of merging or converting: keep the gradients, or write them to disk."""
        item = self.units[unit]
        self._forget_gathered(item)
        if self.layout.homes[unit].grads is Tier.NVME:
            item.phase = Phase.WRITING
            self._items.write(item)
        else:
            item.phase = Phase.HELD
            self.tell_home(unit)

    def _read(self, item: UnitGradients) -> None:
        arrival, item.arrival = item.arrival, None
        if isinstance(arrival, GradRoom):
            item.phase = Phase.GATHERING
            self._emit(Grant(arrival.ticket, (self.slot(arrival.unit),)))
        elif isinstance(arrival, GradReady):
            item.phase = Phase.ARRIVING
            self._copy_out(item)
        else:
            item.phase = Phase.HELD

    # -- the update -----------------------------------------------------------------------------

    def fetch(self, unit: int) -> bool:
        """Start to read stored gradients for the update; return ``False`` if there is no room."""
        item = self.units[unit]
        if not self._host_slot(item):
            return False
        item.phase = Phase.READING
        self._items.read(item)
        return True

    def fetched(self, unit: int) -> bool:
        """Return whether gradients are ready for the update, or are being read for it."""
        item = self.units[unit]
        return item.phase is Phase.HELD or (item.phase is Phase.READING and item.arrival is None)

    def consumed(self, unit: int) -> None:
        """Free the slot of gradients that the update has read.

        They stay on disk, or in a fixed home in memory, if they have either.
        """
        item, home = self.units[unit], self.layout.homes[unit]
        if home.grads is Tier.NVME:
            self._free_slot(item)
            item.phase = Phase.STORED
        elif home.grads is None:
            self._free_slot(item)
            item.phase = Phase.EMPTY

    def tickets(self) -> list[int]:
        """Return the tickets of all requests that wait for room."""
        waiting = [item.arrival for item in self.units if isinstance(item.arrival, GradRoom)]
        return [wish.ticket for wish in (*self.room_wanted, *waiting)]

    def forget_waiting(self) -> None:
        """Drop the requests that wait for room: their callers were notified in another way."""
        self.room_wanted.clear()
        for item in self.units:
            if isinstance(item.arrival, GradRoom):
                item.arrival = None
