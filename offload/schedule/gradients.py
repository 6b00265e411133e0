"""The policy of gradients, from the gathered slot to where they wait for the update."""

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


class Phase(enum.Enum):
    """Where a unit's gradients are on their way."""

    EMPTY = "empty"
    GATHERING = "gathering"  # compute fills the slot that it was granted
    ARRIVING = "arriving"  # copied out, merged, converted
    WRITING = "writing"  # to disk
    HELD = "held"  # in host or device memory, ready for the update
    STORED = "stored"  # on disk, ready to be read for the update
    READING = "reading"  # from disk, for a merge or for the update


_REST = (Phase.EMPTY, Phase.HELD, Phase.STORED)


class UnitGradients(Item):
    """The gradients of one unit, as the update reads them.

    ``gathered``: those that come now, on the device, with room to copy them out to where they must
    first be merged or converted.  ``arrival``: what a read from disk is for.
    """

    __slots__ = ("arrival", "gathered", "phase", "rested")

    def __init__(self, unit: int, nbytes: int) -> None:
        super().__init__(Key(Kind.GRADS, unit), nbytes)
        self.phase = self.rested = Phase.EMPTY
        self.gathered: Item | None = None
        self.arrival: GradReady | GradRoom | None = None


class Gradients:
    """One arrival at a time per unit; units independently.  Waits rather than passing a budget:
    gradients never give way."""

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
        """Whether the update can read them."""
        return self.units[unit].phase is Phase.HELD

    def stored(self, unit: int) -> bool:
        """Whether they wait on disk."""
        return self.units[unit].phase is Phase.STORED

    def slot(self, unit: int) -> Place:
        """Where the update reads them."""
        copy = self._slot(unit)
        assert copy is not None
        return copy.place

    @property
    def moving(self) -> bool:
        """Whether gradients are still on their way to where they rest."""
        return bool(self.arrivals) or any(u.phase not in _REST for u in self.units)

    def _home(self, unit: int) -> Place | None:
        """Where compute may gather at once, which is where they are kept; ``None``: that is
        elsewhere, or something still moves or reads them."""
        item, home = self.units[unit], self.layout.homes[unit]
        if home.grads is not self.layout.compute_tier or unit in self._updating:
            return None
        return home.grad_place if item.phase in _REST else None

    def tell_home(self, unit: int) -> None:
        """Says whether compute may gather where the unit's gradients are kept."""
        if self.layout.homes[unit].grads is self.layout.compute_tier:
            self._emit(GradientStored(unit, self._home(unit) is not None))

    def _slot(self, unit: int) -> Copy | None:
        item = self.units[unit]
        return item.device if self.layout.homes[unit].grads is Tier.DEVICE else item.host

    def _host_slot(self, item: UnitGradients) -> bool:
        """Makes sure that the unit has a host slot."""
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
        """Serves arrivals, then wishes for room, each in order and as far as room allows."""
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
        """Grants room on the device."""
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
        """Compute will not fill the place that it was granted; a place that was handed over since,
        or never granted, is none of this."""
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
        """Compute has gathered the gradients."""
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
        """Starts to copy gathered gradients out of the device."""
        item = self.units[signal.unit]
        gathered = item.gathered
        assert gathered is not None
        if not self._host_slot(item):
            return False
        if (signal.merge or self.layout.converts[signal.unit]) and (
            self._items.make_room(gathered, Tier.HOST) is None
        ):
            self._free_slot(item)  # both or none: who waits holds no room
            return False
        if signal.merge and item.rested is Phase.STORED:
            item.phase, item.arrival = Phase.READING, signal
            self._items.read(item, urgent=True)
        else:
            self._copy_out(item)
        return True

    def _copy_out(self, item: UnitGradients) -> None:
        """To where they are merged or converted, else to where they are kept."""
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
        """They are what the update is to read."""
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
        """Brings stored gradients to host memory for the update.  ``False``: no room yet."""
        item = self.units[unit]
        if not self._host_slot(item):
            return False
        item.phase = Phase.READING
        self._items.read(item)
        return True

    def fetched(self, unit: int) -> bool:
        """Whether they are where the update reads them, or are being read for it."""
        item = self.units[unit]
        return item.phase is Phase.HELD or (item.phase is Phase.READING and item.arrival is None)

    def consumed(self, unit: int) -> None:
        """The update has read them.  On disk they stay; a fixed home keeps them as well."""
        item, home = self.units[unit], self.layout.homes[unit]
        if home.grads is Tier.NVME:
            self._free_slot(item)
            item.phase = Phase.STORED
        elif home.grads is None:
            self._free_slot(item)
            item.phase = Phase.EMPTY

    def tickets(self) -> list[int]:
        """Of all who wait for room."""
        waiting = [item.arrival for item in self.units if isinstance(item.arrival, GradRoom)]
        return [wish.ticket for wish in (*self.room_wanted, *waiting)]

    def forget_waiting(self) -> None:
        """Whoever waited for room was told otherwise."""
        self.room_wanted.clear()
        for item in self.units:
            if isinstance(item.arrival, GradRoom):
                item.arrival = None
