"""Reads and writes whole items while nothing moves: for loading, saving and editing."""

from __future__ import annotations

import torch

from ..errors import OffloadError
from ..facts.tier import Tier
from ..io_engine import Extent, IoEngine
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.messages import Item, Kind
from ..schedule.weights import Roles
from .executor import Executor
from .extents import Extents
from .unsignalled import Unsignalled


class DirectAccess:
    """``load`` gives an item's current bytes in memory, ``store`` makes edited ones current.

    The bytes lie in the item's fixed home, or in the region it moves through: one item of a kind
    is in hand at a time, and nothing else may run in between.
    """

    def __init__(
        self, layout: Layout, executor: Executor, io: IoEngine | None, extents: Extents
    ) -> None:
        self._layout, self._executor, self._io, self._extents = layout, executor, io, extents
        self._transfers = Unsignalled("overspill-direct")
        self._subgroups = {s.index: s for group in layout.subgroups for s in group}
        self._state_home = {
            s.index: place
            for group, home in zip(layout.subgroups, layout.homes, strict=True)
            for s, place in zip(group, home.state_places, strict=True)
        }

    def settle(self) -> None:
        """Waits until nothing moves, and drops all cached copies."""
        self.finish()
        self._executor.settle_down()
        with self._executor.lock:
            self._executor.machine.drop_caches()

    # -- places ---------------------------------------------------------------------------------

    def place(self, item: Item) -> Place:
        """Where the item's bytes are while in hand."""
        if item.kind is Kind.STATE:
            fixed = self._state_home[item.number]
            nbytes = self._subgroups[item.number].nbytes
        else:
            home = self._layout.homes[item.number]
            if item.kind is Kind.WEIGHTS:
                fixed = home.device_place if home.weights is Tier.DEVICE else home.host_place
                nbytes = self._layout.units[item.number].weight_bytes
            else:
                fixed = home.grad_place
                nbytes = self._layout.grad_bytes[item.number]
        if fixed is not None:
            return fixed
        with self._executor.lock:
            place: Place | None = self._executor.machine.scratch(item.kind, nbytes)
        if place is None:
            raise OffloadError(
                f"no room in host memory to bring {item.kind.value} {item.number} to: graphs of "
                "earlier forwards still hold weights; let go of their losses and outputs"
            )
        return place

    def starts_clear(self, subgroup: int) -> bool:
        """Whether a record that is never stored reads as zeroes."""
        return self._state_home[subgroup] is None

    def _on_disk(self, item: Item) -> bool:
        if item.kind is Kind.STATE:
            return self._state_home[item.number] is None
        home = self._layout.homes[item.number]
        tier = home.weights if item.kind is Kind.WEIGHTS else home.grads
        return tier is Tier.NVME

    def _roles(self, item: Item) -> Roles | None:
        machine = self._executor.machine
        if item.kind is Kind.WEIGHTS:
            return machine.weights.units[item.number].roles
        if item.kind is Kind.STATE:
            return machine.updates.states[item.number].roles
        return None

    # -- moving ---------------------------------------------------------------------------------

    def load(self, item: Item) -> Place:
        """Brings the current bytes of an item to its place (flat, on the device if home there)."""
        place = self.place(item)
        if place.tier is Tier.DEVICE:
            self._executor.wait_for(place)  # updates run on a stream of their own
        if self._on_disk(item) and place.nbytes:
            roles = self._roles(item)
            memory = self._executor.arenas.bytes_of(place)
            if roles is not None and not roles.written:
                memory.zero_()
            else:
                role = roles.newest if roles is not None else 0
                self._read(self._extents.of(item, role), memory)
        return place

    def store(self, item: Item, *, first: bool = False) -> None:
        """Makes the bytes at the item's place current in every tier that has a lasting copy.

        ``first``: the item's first bytes, which go where a read will look for them.
        """
        place = self.place(item)
        if place.tier is Tier.DEVICE:
            self._executor.mark_device_use(place, self._executor.accelerator.record())
        if self._on_disk(item) and place.nbytes:
            roles = self._roles(item)
            role = 0 if roles is None or first else roles.target()
            memory = self._executor.arenas.bytes_of(place)
            self._write(self._extents.of(item, role), memory)
            if roles is not None:
                roles.newest = role
        self._executor.machine.commits.change(item)
        if item.kind is Kind.WEIGHTS:
            self._refresh_device(item.number, place)

    def reload(self, item: Item) -> None:
        """Brings what the newest extent holds to every tier that has a lasting copy."""
        place, roles = self.place(item), self._roles(item)
        assert roles is not None
        home = self._layout.homes[item.number] if item.kind is Kind.WEIGHTS else None
        if self._on_disk(item) and (home is None or home.device_place is None):
            return
        memory = self._executor.arenas.bytes_of(place)
        if roles.written:
            extent = self._extents.of(item, roles.newest)
            self._read(extent, memory)
        else:
            memory.zero_()
        if home is not None:
            self._refresh_device(item.number, place)

    def _read(self, extent: Extent, memory: torch.Tensor) -> None:
        io = self._io
        assert io is not None
        self._transfers.run(lambda: io.read(extent, memory.numpy(), urgent=True).wait())

    def _write(self, extent: Extent, memory: torch.Tensor) -> None:
        io = self._io
        assert io is not None
        self._transfers.run(lambda: io.write(extent, memory.numpy(), urgent=True).wait())

    def finish(self) -> None:
        """Waits for a transfer that an exception has left on its way."""
        self._transfers.finish()

    def close(self) -> None:
        """Ends the thread that makes the transfers."""
        self._transfers.close()

    def _refresh_device(self, unit: int, place: Place) -> None:
        device = self._layout.homes[unit].device_place
        if device is not None and device != place and device.nbytes:
            executor = self._executor
            executor.wait_for(device)  # compute on a stream of the caller's may still read it
            executor.accelerator.used(executor.arenas.bytes_of(device))
            executor.arenas.bytes_of(device).copy_(executor.arenas.bytes_of(place))
            executor.mark_device_use(device, executor.accelerator.record())
