"""Starts the machine's moves: transfers to and from disk, copies over the host link."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..facts.tier import Tier
from ..facts.trace import Trace
from ..schedule.layout import Layout
from ..schedule.messages import CopyIn, CopyOut, Key, Kind, Read, Write
from ..schedule.units import Unit
from .accelerators.base import Accelerator, CopyDone
from .compute_use import RangeEvents
from .disk import Disk, Moved
from .extents import Extents
from .page_conversion import unpack_unit
from .pools import Arenas
from .saved_storages import OffloadedStorage, SavedStore

Transfer = Read | Write | CopyIn | CopyOut


class Mover:
    """Passes each move to the disk or the accelerator, and reports its end to ``finished``."""

    def __init__(
        self,
        layout: Layout,
        arenas: Arenas,
        accelerator: Accelerator,
        disk: Disk | None,
        extents: Extents,
        events: RangeEvents,
        trace: Trace,
        saved: SavedStore,
        finished: Callable[[Transfer, BaseException | None], None],
    ) -> None:
        self._arenas, self._accelerator, self._disk = arenas, accelerator, disk
        self._extents, self._events, self._trace, self._finished = (
            extents, events, trace, finished
        )  # fmt: skip
        self._layout, self._saved = layout, saved

    def start(self, work: Transfer) -> None:
        """Begin a move; its end is reported on another thread."""
        if isinstance(work, Read):
            self._transfer(work, "read")
        elif isinstance(work, Write):
            self._transfer(work, "write")
        elif work.item.kind is Kind.SAVED:
            self._fetch(work) if isinstance(work, CopyIn) else self._spill(work)
        elif isinstance(work, CopyIn):
            self._copy_in(work)
        else:
            self._copy_out(work)

    def forget(self, item: Key) -> None:
        """Free the extent of a saved storage that nothing needs any more."""
        self._extents.give_back(item)

    def may_be_changed(self, work: Write) -> bool:
        """Return whether a commit saves an item from memory that the user may change."""
        return work.saves and work.item.kind is Kind.WEIGHTS and not self._layout.has_device

    def _transfer(self, work: Read | Write, lane: str) -> None:
        assert self._disk is not None
        if work.item.kind is Kind.SAVED and isinstance(work, Write):
            self._extents.take(work.item, work.place.nbytes)
        memory = self._arenas.bytes_of(work.place).numpy()
        name = self._layout.name(work.item)

        def done(moved: Moved) -> None:
            self._trace.add(lane, name, moved.started_ns, moved.finished_ns, moved.nbytes)
            self._finished(work, moved.error)

        with self._trace.during(lane, name):
            if isinstance(work, Read):
                source = self._extents.source(work.item, work.role)
                self._disk.read(source, memory, urgent=work.urgent, on_done=done)
            else:
                extent = self._extents.of(work.item, work.role)
                changing = self.may_be_changed(work)
                self._disk.write(extent, memory, changing=changing, on_done=done)

    def _copy_in(self, work: CopyIn) -> None:
        unit = self._layout.units[work.item.number]
        if unit.packed:
            self._unpack(work, unit)
            return
        with self._trace.during("copy_in", self._unit_name(work)):
            event = self._accelerator.copy_in(
                self._arenas.bytes_of(work.place),
                self._arenas.bytes_of(work.source),
                after=self._events.over(work.place),
                on_done=self._copied(work, "copy_in"),
            )
            self._events.set(work.place, event)

    def _unpack(self, work: CopyIn, unit: Unit) -> None:
        after = self._events.over(work.place)
        if work.source.tier is Tier.DEVICE:
            after = [*after, *self._events.over(work.source)]
        with self._trace.during("copy_in", unit.name):
            event = self._accelerator.unpack(
                self._arenas.bytes_of(work.place), self._arenas.bytes_of(work.source),
                lambda weights, page: unpack_unit(unit, page, weights),
                after=after, on_done=self._copied(work, "copy_in"),
            )  # fmt: skip
            self._events.set(work.place, event)

    def _copy_out(self, work: CopyOut) -> None:
        with self._trace.during("copy_out", self._unit_name(work)):
            event = self._accelerator.copy_out(
                self._arenas.bytes_of(work.place).narrow(0, 0, work.source.nbytes),
                self._arenas.bytes_of(work.source),
                after=self._events.over(work.source),
                on_done=self._copied(work, "copy_out"),
            )
            self._events.set(work.source, event)

    def _spill(self, work: CopyOut) -> None:
        saved = self._saved.get(work.item.number)
        source = None if saved is None else saved.memory
        if saved is None or source is None:  # the signal of its end is on its way
            self._finished(work, None)
            return
        event, blocks = saved.event, saved.blocks
        part, nbytes = self._part(work.item, saved, source)
        place = self._arenas.bytes_of(work.place).narrow(0, 0, nbytes)
        if source.device != self._accelerator.device:  # see ``_lend``
            place.copy_(part) if blocks is None else blocks.pack(part, place)
            self._finished(work, None)
            return
        with self._trace.during("copy_out", self._unit_name(work)):
            self._accelerator.spill(
                place, part, after=[] if event is None else [event],
                on_done=self._copied(work, "copy_out"), blocks=blocks,
            )  # fmt: skip

    def _fetch(self, work: CopyIn) -> None:
        saved = self._saved.get(work.item.number)
        if saved is None:
            self._finished(work, None)
            return
        blocks = saved.blocks
        with self._trace.during("copy_in", self._unit_name(work)):
            if saved.coming is None:
                saved.coming = self._lend(saved.nbytes)
            part, nbytes = self._part(work.item, saved, saved.coming)
            source = self._arenas.bytes_of(work.source).narrow(0, 0, nbytes)
            saved.filled += part.numel()
            if saved.coming.device != self._accelerator.device:
                part.copy_(source) if blocks is None else blocks.unpack(source, part)
                if saved.filled == saved.nbytes:
                    saved.bring(None)
                self._finished(work, None)
                return
            event = self._accelerator.fetch(
                part, source, after=[], on_done=self._copied(work, "copy_in"), blocks=blocks
            )
            if saved.filled == saved.nbytes:  # copies run in order, so the last event covers all
                saved.bring(event)

    def _lend(self, nbytes: int) -> torch.Tensor:
        """Return memory for a storage that comes back.

        If the device has none, it comes back to host memory, beyond its budget.  The thread that
        needs it copies it to the device, or gets the error.
        """
        try:
            return self._accelerator.lend(nbytes)
        except torch.OutOfMemoryError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _part(
        self, item: Key, saved: OffloadedStorage, memory: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Return a part of the storage in ``memory``, and its bytes on lower tiers."""
        each = self._layout.saved.part_bytes(saved.nbytes)
        start = item.part * each
        nbytes = min(each, saved.nbytes - start)
        below = nbytes if saved.blocks is None else saved.blocks.packed_bytes(nbytes)
        return memory.narrow(0, start, nbytes), below

    def _unit_name(self, work: CopyIn | CopyOut) -> str:
        if work.item.kind is Kind.SAVED:
            return self._layout.name(work.item)
        return self._layout.units[work.item.number].name

    def _copied(self, work: CopyIn | CopyOut, lane: str) -> Callable[[CopyDone], None]:
        def done(copy: CopyDone) -> None:
            name = self._unit_name(work)
            self._trace.add(lane, name, copy.started_ns, copy.finished_ns, copy.nbytes)
            self._finished(work, copy.error)

        return done
