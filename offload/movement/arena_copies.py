"""Copies of bytes of the memory arenas, in host memory or on disk, while the arenas are freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from typing_extensions import Self

from ..errors import LifecycleError, OffloadError
from ..facts.tier import Tier
from ..io_engine import Extent, IoEngine, Lease, Ticket, allocate_host
from ..schedule.arena import Place
from ..schedule.units import PAGE, align
from .accelerators.base import Accelerator
from .compute_use import ComputeUse
from .memory import Memory, require_free
from .pools import Reservation

PIECE_BYTES = 16 << 20
AT_ONCE = 2  # transfers


class ArenaPiece(NamedTuple):
    """A place in an arena, of at most ``PIECE_BYTES``, and the flat uint8 memory of its bytes."""

    place: Place
    memory: torch.Tensor
    on_device: bool


class _Copy(NamedTuple):
    place: Place
    memory: torch.Tensor | None  # on the host
    extent: Extent | None = None
    files: IoEngine | None = None


class ArenaCopies:
    """Makes the copies, reads them, and puts them back."""

    def __init__(
        self, memory: Memory, accelerator: Accelerator, compute: ComputeUse,
        folders: Sequence[Path], *, checksum: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            compute: orders other work after these copies.
            folders: directories for copies on disk; empty: there are none.
        """
        self._memory, self._accelerator, self._compute = memory, accelerator, compute
        self._folders, self._checksum = folders, checksum
        self._all: list[_Copy] = []
        self._leases: list[Lease] = []
        self._files: list[IoEngine] = []
        self._reserved: dict[Tier, list[Reservation]] = {Tier.HOST: [], Tier.NVME: []}

    def require_disk(self) -> None:
        """Raise unless there is a directory for copies.

        Raises:
            OffloadError: there is none.
        """
        if not self._folders:
            raise LifecycleError(
                "sleep(host=True) copies host memory to disk: pass nvme= (a directory) to wrap, or "
                "call sleep() to free device memory only"
            )

    @property
    def in_memory(self) -> bool:
        """Whether any copy is in host memory."""
        return bool(self._leases)

    @property
    def places(self) -> list[Place]:
        """The places that were copied."""
        return [copy.place for copy in self._all]

    # -- making copies --------------------------------------------------------------------------

    def add(self, sources: Sequence[ArenaPiece], *, to_disk: bool) -> None:
        """Copy pieces to host memory, or to disk with ``to_disk`` or if host memory has no room.

        ``to_disk`` also moves earlier copies there.  After an error nothing has changed.

        Raises:
            BudgetError, IoError: there is no room.
        """
        if not to_disk:
            try:
                self._all += self._in_memory(sources)
                return
            except OffloadError:
                if not self._folders:
                    raise
        stays = [copy for copy in self._all if not (to_disk and copy.memory is not None)]
        moves = [
            ArenaPiece(c.place, c.memory, on_device=False)
            for c in self._all
            if c.memory is not None
        ]
        made = self._on_disk([*sources, *(moves if to_disk else [])])
        self._all = [*stays, *made]
        if to_disk:
            self._free(Tier.HOST)

    def _in_memory(self, sources: Sequence[ArenaPiece]) -> list[_Copy]:
        nbytes = _bytes_of(sources)
        if not nbytes:
            return []
        reservation = self._memory.reserve_copy(Tier.HOST, nbytes)
        made, at = list[_Copy](), 0
        try:
            require_free(nbytes)
            lease = allocate_host(nbytes)
            room = torch.from_numpy(lease.array)
            for each in sources:
                copy = room.narrow(0, at, each.place.nbytes)
                self._copy(copy, each.memory, device=each.memory)
                made.append(_Copy(each.place, copy))
                at += align(each.place.nbytes, PAGE)
        except BaseException:  # the lease ends with its last view
            reservation.release()
            raise
        self._reserved[Tier.HOST].append(reservation)
        self._leases.append(lease)
        return made

    def _on_disk(self, sources: Sequence[ArenaPiece]) -> list[_Copy]:
        nbytes = _bytes_of(sources)
        if not nbytes:
            return []
        reservation = self._memory.reserve_copy(Tier.NVME, nbytes)
        try:
            files = IoEngine(list(self._folders), nbytes, checksum=self._checksum, ephemeral=True)
            try:
                made = self._write(files, sources)
            except BaseException:
                files.close()
                raise
        except BaseException:
            reservation.release()
            raise
        self._reserved[Tier.NVME].append(reservation)
        self._files.append(files)
        return made

    def _write(self, files: IoEngine, sources: Sequence[ArenaPiece]) -> list[_Copy]:
        made = list[_Copy]()
        with _Flights() as flights:
            for each in sources:
                memory = each.memory
                if each.on_device:
                    memory = flights.buffer(each.place.nbytes)
                    self._copy(memory, each.memory, device=each.memory)
                extent = files.allocate(each.place.nbytes)
                flights.add(files.write(extent, memory.numpy()))
                made.append(_Copy(each.place, None, extent, files))
        return made

    def _copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.Tensor) -> None:
        """Copy between host memory and ``device``, which is one of the two."""
        self._accelerator.used(device)
        target.copy_(source)

    # -- using copies ---------------------------------------------------------------------------

    def read(self, place: Place) -> torch.Tensor | None:
        """Return a copy of the bytes of any place; ``None`` if not all of it was copied."""
        found, left = torch.empty(place.nbytes, dtype=torch.uint8, device="cpu"), place.nbytes
        for copy in self._all:
            if not copy.place.overlaps(place):
                continue
            low = max(place.offset, copy.place.offset)
            high = min(place.offset + place.nbytes, copy.place.offset + copy.place.nbytes)
            part = self._content(copy).narrow(0, low - copy.place.offset, high - low)
            found.narrow(0, low - place.offset, high - low).copy_(part)
            left -= high - low
        return None if left else found

    def _content(self, copy: _Copy) -> torch.Tensor:
        if copy.memory is not None:
            return copy.memory
        assert copy.extent is not None and copy.files is not None
        memory = torch.from_numpy(allocate_host(copy.extent.padded_bytes).array)
        copy.files.read(copy.extent, memory.numpy()).wait()
        return memory

    def restore(self, targets: Sequence[ArenaPiece]) -> None:
        """Fill pieces from their copies, and forget these copies.

        Raises:
            IoError, CorruptionError: a copy on disk cannot be read; no copy is forgotten.
        """
        copies = {copy.place: copy for copy in self._all}
        with _Flights() as flights:
            for each in targets:
                copy = copies[each.place]
                if copy.memory is not None:
                    self._fill(each, copy.memory)
                    continue
                assert copy.extent is not None and copy.files is not None
                memory = flights.buffer(each.place.nbytes) if each.on_device else each.memory
                ticket = copy.files.read(copy.extent, memory.numpy())
                flights.add(ticket, partial(self._fill, each, memory) if each.on_device else None)
        done = {each.place for each in targets}
        self._all = [copy for copy in self._all if copy.place not in done]

    def _fill(self, target: ArenaPiece, source: torch.Tensor) -> None:
        if target.on_device:
            self._copy(target.memory, source, device=target.memory)
            self._compute.mark(target.place)
        else:
            target.memory.copy_(source)

    def close(self) -> None:
        """Drop all copies."""
        self._all = []
        self._free(Tier.HOST)
        while self._files:
            self._files.pop().close()
        self._free(Tier.NVME)

    def _free(self, tier: Tier) -> None:
        if tier is Tier.HOST:
            while self._leases:
                self._leases.pop().release()
        while self._reserved[tier]:
            self._reserved[tier].pop().release()


class _Flights:
    """Transfers on their way, a few at a time, and buffers for those of device memory."""

    def __init__(self) -> None:
        self._flights: deque[tuple[Ticket, Callable[[], None] | None]] = deque()
        self._buffers: Lease | None = None
        self._next = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory for the next transfer to be added."""
        self._wait(AT_ONCE - 1)
        if self._buffers is None:
            self._buffers = allocate_host(AT_ONCE * PIECE_BYTES)
        self._next = (self._next + 1) % AT_ONCE
        return torch.from_numpy(self._buffers.array).narrow(0, self._next * PIECE_BYTES, nbytes)

    def add(self, ticket: Ticket, then: Callable[[], None] | None = None) -> None:
        """Add a transfer that has begun; ``then`` is called at its end."""
        self._flights.append((ticket, then))
        self._wait(AT_ONCE)

    def _wait(self, most: int) -> None:
        """Wait until at most ``most`` transfers are on their way."""
        while len(self._flights) > most:
            ticket, then = self._flights.popleft()
            ticket.wait()
            if then is not None:
                then()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if raised is None:
                self._wait(0)
        finally:
            for ticket, _ in self._flights:
                with suppress(Exception):  # the first error is raised already
                    ticket.wait()
            if self._buffers is not None:
                self._buffers.release()


def _bytes_of(pieces: Sequence[ArenaPiece]) -> int:
    return sum(align(each.place.nbytes, PAGE) for each in pieces)
