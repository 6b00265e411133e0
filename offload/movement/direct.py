"""Access to whole items while nothing else moves: for loading, saving and editing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..facts.tier import Tier
from ..io_engine import Extent, IoEngine, allocate_host
from ..io_engine.file_ranges import FileRanges
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.messages import Edited, Key, Kind, Locate, Until
from .disk import Disks
from .executor import Executor
from .extents import Extents
from .page_conversion import unpack_unit
from .uninterruptible_thread import UninterruptibleThread


class DirectAccess:
    """Reads (``bring``) and writes (``store``) the current bytes of whole items in memory.

    The bytes lie in the item's fixed home, or in the region that it moves through. Only one item of
    a kind is accessed at a time, and nothing else may run in between.
    """

    def __init__(
        self, layout: Layout, executor: Executor, io: IoEngine | None, disks: Disks,
        extents: Extents, wake: Callable[[], None],
    ) -> None:  # fmt: skip
        """Set up; ``wake``: called before anything is used, in case memory is freed."""
        self._wake = wake
        self._layout, self._executor, self._io, self._extents = layout, executor, io, extents
        self._disks = disks
        self._transfers = UninterruptibleThread("overspill-direct")

    def quiesce(self) -> None:
        """Wait until nothing moves, and drop all cached copies."""
        self.finish()
        self._executor.protocol.wait(Until.QUIET)

    # -- places ---------------------------------------------------------------------------------

    def place(self, item: Key) -> Place:
        """Return where the item's bytes are during access."""
        tier, fixed = self._layout.home(item)
        if fixed is not None and tier is not Tier.NVME:
            return fixed
        return self._locate(item)[0]

    def _locate(self, item: Key) -> tuple[Place, int, int]:
        """Return the item's place, the role of the extent to read, and that of the one to write."""
        grant = self._executor.engine_port.ask(lambda ticket: Locate(item, ticket))
        assert grant.roles is not None
        return (grant.places[0], *grant.roles)

    def starts_clear(self, subgroup: int) -> bool:
        """Return whether this record has no stored value, so that it reads as zeros."""
        return self._layout.home(Key(Kind.STATE, subgroup))[1] is None

    def _on_disk(self, item: Key) -> bool:
        return self._layout.home(item)[0] is Tier.NVME

    def reserve(self, item: Key) -> None:
        """Reserve disk space for an item that is about to be changed.

        Raises:
            IoError: the disk has no room.
        """
        if self._layout.durable and self._io is not None and self._layout.nbytes(item):
            self._io.reserve(self._extents.of(item, self._locate(item)[2]))

    # -- moving ---------------------------------------------------------------------------------

    def bring(self, item: Key) -> Place:
        """Bring the current bytes of an item to its place, and return the place.

        The bytes are flat; they are on the device if the item lives there.
        """
        if not self._on_disk(item):
            place = self.place(item)
            if place.tier is Tier.DEVICE:
                self._executor.compute.follow(place)  # updates run on a stream of their own
            return place
        place, newest, _ = self._locate(item)
        if place.nbytes:
            memory = self._executor.arenas.bytes_of(place)
            if newest < 0:
                memory.zero_()
            else:
                self._read(self._extents.source(item, newest), memory)
        return place

    def read_item_asleep(self, item: Key) -> torch.Tensor:
        """Return a copy of an item's bytes while the engine sleeps, without using its place."""
        if not self._on_disk(item):
            return self._executor.arenas.bytes_of(self.place(item))
        place, newest, _ = self._locate(item)
        memory = torch.from_numpy(allocate_host(max(1, place.nbytes)).array)[: place.nbytes]
        if newest >= 0 and place.nbytes:
            self._read(self._extents.source(item, newest), memory)
        return memory

    def store(self, item: Key, *, first: bool = False) -> None:
        """Make the bytes at the item's place current in every tier that keeps a lasting copy.

        Args:
            first: these are the item's first bytes, which go to the extent that is read next.
        """
        assert self._executor.arenas.read_freed is None, (
            f"{item} is written while the engine sleeps"
        )
        role: int | None = None
        if self._on_disk(item):
            place, _, target = self._locate(item)
            role = 0 if first else target
            if place.nbytes:
                self._write(self._extents.of(item, role), self._executor.arenas.bytes_of(place))
        else:
            place = self.place(item)
            if place.tier is Tier.DEVICE:
                self._executor.compute.mark(place)
        self._executor.engine_port.tell(Edited(item, role))
        if item.kind is Kind.WEIGHTS:
            self._refresh_device(item.number, place)

    def reload(self, item: Key) -> None:
        """Copy the contents of the newest extent to every tier that keeps a lasting copy."""
        home = self._layout.homes[item.number] if item.kind is Kind.WEIGHTS else None
        if self._on_disk(item) and (home is None or not home.stays):
            return
        place, newest, _ = self._locate(item)
        memory = self._executor.arenas.bytes_of(place)
        if newest >= 0:
            self._read(self._extents.source(item, newest), memory)
        else:
            memory.zero_()
        if home is not None:
            self._refresh_device(item.number, place)

    def _read(self, source: Extent | FileRanges, memory: torch.Tensor) -> None:
        self._transfers.run(lambda: self._disks.read(source, memory.numpy(), urgent=True).wait())

    def _write(self, extent: Extent, memory: torch.Tensor) -> None:
        self._transfers.run(lambda: self._disks.write(extent, memory.numpy(), urgent=True).wait())

    def finish(self) -> None:
        """Wait for a transfer that an exception left in progress, and wake the engine."""
        self._transfers.finish()
        self._wake()

    def close(self) -> None:
        """End the thread that runs the transfers."""
        self._transfers.close()

    def _refresh_device(self, unit: int, place: Place) -> None:
        """Update a unit's copies on the device from ``place``: the page, and what compute uses."""
        home, executor = self._layout.homes[unit], self._executor
        page = home.host_place if home.page_on_device else None
        for device in (page, home.device_place):
            if device is None or device == place or not device.nbytes:
                continue
            executor.compute.follow(device)  # compute on the caller's stream may still read it
            target, source = executor.arenas.bytes_of(device), executor.arenas.bytes_of(place)
            executor.accelerator.used(target)
            if device is not page and self._layout.units[unit].packed:
                unpack_unit(self._layout.units[unit], source.to(target.device), target)
            else:
                target.copy_(source)
            executor.compute.mark(device)
