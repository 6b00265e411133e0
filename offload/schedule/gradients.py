"""Gradients of every unit, from the gathered slot to where they wait for the update."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Container

from ..facts.tier import Tier
from .arena import Arena, Place
from .layout import Layout
from .messages import CopyOut, GradReady, GradRoom, Grant, Instruction, Item, Kind, Read, Settle
from .messages import Write as WriteOut


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


class _Unit:
    __slots__ = ("arrival", "device", "phase", "readied", "rested", "slot", "staging")

    def __init__(self) -> None:
        self.phase = self.rested = Phase.EMPTY
        self.slot: Place | None = None  # in host memory, as the update reads it
        self.device: Place | None = None  # gathered, on the device
        self.staging: Place | None = None  # copied out, before a merge or a conversion
        self.arrival: GradReady | GradRoom | None = None
        self.readied = 0  # times that gradients were gathered


class Gradients:
    """One arrival at a time per unit; units independently.  Waits rather than passing a budget."""

    def __init__(
        self, layout: Layout, updating: Container[int], emit: Callable[[Instruction], None]
    ) -> None:
        self.layout, self._updating, self._emit = layout, updating, emit
        regions = layout.regions
        device_base = regions.device_fixed + regions.device_weights
        host_base = regions.host_fixed + regions.host_weights
        self.device_arena = Arena(Tier.DEVICE, device_base, regions.device_grads)
        self.host_arena = Arena(Tier.HOST, host_base, regions.host_grads)
        self.units = [_Unit() for _ in layout.units]
        for unit, home in zip(self.units, layout.homes, strict=True):
            unit.slot = home.grad_place
        self.room_wanted: deque[GradRoom] = deque()
        self.arrivals: deque[GradReady] = deque()

    # -- questions ------------------------------------------------------------------------------

    def held(self, unit: int) -> bool:
        return self.units[unit].phase is Phase.HELD

    def stored(self, unit: int) -> bool:
        return self.units[unit].phase is Phase.STORED

    @property
    def moving(self) -> bool:
        """Whether gradients are still on their way to where they rest."""
        return bool(self.arrivals) or any(u.phase not in _REST for u in self.units)

    def at_home(self, unit: int) -> Place | None:
        """Where compute may gather at once, which is where they are kept; ``None``: that is
        elsewhere, or something still moves or reads them.  Nothing has to be told for it."""
        item, home = self.units[unit], self.layout.homes[unit]
        if home.grads is not self.layout.compute_tier or unit in self._updating:
            return None
        return home.grad_place if item.phase in _REST else None

    def _fixed(self, unit: int) -> bool:
        return self.layout.homes[unit].grad_place is not None

    def _host_slot(self, unit: int) -> bool:
        """Makes sure that the unit has a host slot."""
        item = self.units[unit]
        if item.slot is None:
            item.slot = self.host_arena.allocate(self.layout.grad_bytes[unit])
        return item.slot is not None

    # -- room for compute to gather in ------------------------------------------------------------

    def want_room(self, signal: GradRoom) -> None:
        self.room_wanted.append(signal)

    def advance(self) -> None:
        """Serves arrivals, then wishes for room, each in order and as far as room allows."""
        while self.arrivals and self._arrive(self.arrivals[0]):
            self.arrivals.popleft()
        while self.room_wanted and self._serve(self.room_wanted[0]):
            self.room_wanted.popleft()

    def _serve(self, signal: GradRoom) -> bool:
        item, home = self.units[signal.unit], self.at_home(signal.unit)
        if home is not None:
            self._emit(Grant(signal.ticket, home))
            return True
        if item.phase not in _REST or item.device is not None or signal.unit in self._updating:
            return False
        if self.layout.has_device:
            item.device = self.device_arena.allocate(self.layout.units[signal.unit].grad_bytes)
            if item.device is None:
                return False
            self._emit(Grant(signal.ticket, item.device))
            return True
        if not self._host_slot(signal.unit):
            return False
        assert item.slot is not None
        if signal.merge and item.phase is Phase.STORED:
            item.phase, item.arrival = Phase.READING, signal
            self._emit(Read(Item(Kind.GRADS, signal.unit), 0, item.slot, urgent=True))
            return True
        item.phase = Phase.GATHERING
        self._emit(Grant(signal.ticket, item.slot))
        return True

    def lost(self, unit: int) -> None:
        """Compute will not fill the place that it was granted; a place that was handed over since,
        or never granted, is none of this."""
        item = self.units[unit]
        if item.phase is Phase.GATHERING:
            self._free_slot(unit)
            item.phase = Phase.EMPTY
        elif item.phase in _REST and item.device is not None:
            self.device_arena.free(item.device)
            item.device = None

    # -- arrival --------------------------------------------------------------------------------

    def ready(self, signal: GradReady) -> None:
        """Compute has gathered the gradients."""
        item = self.units[signal.unit]
        item.readied += 1
        home = self.layout.homes[signal.unit]
        if home.grads is Tier.DEVICE or not self.layout.has_device:
            item.phase = Phase.ARRIVING  # gathered where they are kept: nothing to copy
            assert item.slot is not None
            if signal.settled:
                self.settled(signal.unit)
            else:
                self._emit(Settle(signal.unit, item.slot, item.slot))
        else:
            item.rested, item.phase = item.phase, Phase.ARRIVING
            self.arrivals.append(signal)

    def _arrive(self, signal: GradReady) -> bool:
        """Starts to copy gathered gradients out of the device."""
        item = self.units[signal.unit]
        gathered = self.layout.units[signal.unit].grad_bytes
        convert = self.layout.converts[signal.unit]
        if not self._host_slot(signal.unit):
            return False
        assert item.slot is not None and item.device is not None
        if signal.merge or convert:
            item.staging = self.host_arena.allocate(gathered)
            if item.staging is None:
                self._free_slot(signal.unit)  # both or none: who waits holds no room
                return False
        if signal.merge and item.rested is Phase.STORED:
            item.phase, item.arrival = Phase.READING, signal
            self._emit(Read(Item(Kind.GRADS, signal.unit), 0, item.slot, urgent=True))
            return True
        self._emit(CopyOut(signal.unit, item.device, item.staging or item.slot))
        return True

    # -- events ---------------------------------------------------------------------------------

    def copied_out(self, unit: int) -> None:
        item = self.units[unit]
        assert item.device is not None and item.slot is not None
        self.device_arena.free(item.device)
        item.device = None
        self._emit(Settle(unit, item.staging or item.slot, item.slot))

    def settled(self, unit: int) -> None:
        item = self.units[unit]
        if item.staging is not None:
            self.host_arena.free(item.staging)
            item.staging = None
        if self.layout.homes[unit].grads is Tier.NVME:
            item.phase = Phase.WRITING
            assert item.slot is not None
            self._emit(WriteOut(Item(Kind.GRADS, unit), 0, item.slot))
        else:
            item.phase = Phase.HELD

    def write_done(self, unit: int) -> None:
        self._free_slot(unit)
        self.units[unit].phase = Phase.STORED

    def read_done(self, unit: int) -> None:
        item = self.units[unit]
        assert item.slot is not None
        arrival, item.arrival = item.arrival, None
        if isinstance(arrival, GradRoom):
            item.phase = Phase.GATHERING
            self._emit(Grant(arrival.ticket, item.slot))
        elif isinstance(arrival, GradReady):
            item.phase = Phase.ARRIVING
            assert item.device is not None
            self._emit(CopyOut(unit, item.device, item.staging or item.slot))
        else:
            item.phase = Phase.HELD

    # -- the update -----------------------------------------------------------------------------

    def fetch(self, unit: int) -> bool:
        """Brings stored gradients to host memory for the update.  ``False``: no room yet."""
        if not self._host_slot(unit):
            return False
        item = self.units[unit]
        assert item.slot is not None
        item.phase = Phase.READING
        self._emit(Read(Item(Kind.GRADS, unit), 0, item.slot))
        return True

    def fetched(self, unit: int) -> bool:
        """Whether they are where the update reads them, or are being read for it."""
        item = self.units[unit]
        return item.phase is Phase.HELD or (item.phase is Phase.READING and item.arrival is None)

    def consumed(self, unit: int) -> None:
        """The update has read them.  On disk they stay; a fixed home keeps them as well."""
        item, home = self.units[unit], self.layout.homes[unit]
        if home.grads is Tier.NVME:
            self._free_slot(unit)
            item.phase = Phase.STORED
        elif home.grads is None:
            self._free_slot(unit)
            item.phase = Phase.EMPTY

    def _free_slot(self, unit: int) -> None:
        item = self.units[unit]
        if item.slot is not None and not self._fixed(unit):
            self.host_arena.free(item.slot)
            item.slot = None
