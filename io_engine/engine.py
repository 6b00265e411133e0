"""IoEngine: what a user of this package holds.  Builds the parts, and owns their lifetime."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .aiofiles_backend import AiofilesBackend
from .backend import Backend, BackendFactory, NativeBackend, Tuning
from .buffers import Lease, allocate_host
from .committed import OwnedStore
from .dispatch import Dispatcher, Flight, forget_memory, shut_down
from .errors import LifecycleError
from .extent_table import ExtentTable
from .manifest import Generation, Manifest, StoredItem, StoreLayout
from .native import crc32
from .probe import measured_rates
from .settings import choose_tuning, directory_list
from .space import Space, file_shares
from .store_file import StoreFile, create_files, reopen_files
from .transfer import Buffer, cut, plan_transfer, runs_of
from .types import Direction, Extent, IoLaneStats, IoStats, Ticket


class IoEngine:
    """Extents on disk, and transfers between them and host memory.

    All methods may be called from any thread.  Close it, or use it as a context manager; an engine
    that is dropped or alive at interpreter exit is closed too.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        capacity_bytes: int,
        *,
        buffer_bytes: int | None = None,
        backend: str | BackendFactory = "auto",
        block_bytes: int | None = None,
        queue_depth: int | None = None,
        checksum: bool = True,
        ephemeral: bool = False,
        sparse_bytes: int = 0,
        slow_after_s: float = 30.0,
    ) -> None:
        """Opens one store file per directory, ``capacity_bytes`` together, and reserves them.

        Args:
            directories: where; several are striped, in proportion to their measured rates.
            capacity_bytes: room for extents, each counted in whole sectors of 4096 bytes.
            buffer_bytes: the most that leases from ``buffer`` may hold; ``None``: no bound.
            backend: ``"uring"``, ``"threads"``, ``"aiofiles"``, the best of them (``"auto"``), or
                a function that starts another one.
            block_bytes: length of one transfer, a multiple of 4096; ``None``: the best kept for the
                directories by a bench, else 4 MiB.
            queue_depth: transfers in flight per directory; ``None``: as kept, else 12 (threads: 4).
            checksum: verify every byte that is read.
            ephemeral: the files have no name, and vanish with the process, however it ends.
            sparse_bytes: of the capacity, bytes that are not reserved: extents that are allocated
                last take room on disk when they are written.
            slow_after_s: log a warning about a request that takes longer.

        Raises:
            IoError: a directory is missing, not writable, in use by another process, or full.
            ValueError: an argument makes no sense.
            RuntimeError: the backend cannot run here.
        """
        paths = directory_list(directories)
        if capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes must be positive, not {capacity_bytes}")
        tuning = choose_tuning(paths, backend, block_bytes, queue_depth)
        start = open_backend if isinstance(backend, str) else backend
        rates = measured_rates(paths, tuning, start) if len(paths) > 1 else [1.0]
        reserved = file_shares(capacity_bytes - sparse_bytes, rates, tuning.block_bytes)
        sparse = file_shares(sparse_bytes, rates, tuning.block_bytes)
        sizes = [some + more for some, more in zip(reserved, sparse, strict=True)]
        self.capacity_bytes, self.checksum, self.tuning = capacity_bytes, checksum, tuning
        space = Space(sizes, rates, tuning.block_bytes)
        files = create_files(paths, sizes, sparse, ephemeral=ephemeral)
        self._open(files, space, start, buffer_bytes, slow_after_s)

    @classmethod
    def reopen(
        cls,
        store: OwnedStore,
        generation: Generation,
        *,
        extra_bytes: int = 0,
        buffer_bytes: int | None = None,
        backend: str | BackendFactory = "auto",
        queue_depth: int | None = None,
        slow_after_s: float = 30.0,
    ) -> IoEngine:
        """Opens a durable store with what ``generation`` says is in its extents, and takes its
        locks over.

        Reads are checked against the checksums of the commit.  ``extra_bytes``: room beyond the
        store's items.  Close leaves the store where it is.

        Raises:
            IoError: as on opening a new one.
            CorruptionError: the layout's extents overlap.
        """
        layout, paths = store.layout, store.directories
        tuning = choose_tuning(paths, backend, layout.block_bytes, queue_depth)
        start = open_backend if isinstance(backend, str) else backend
        engine = cls.__new__(cls)
        rates = [float(max(nbytes, 1)) for nbytes in layout.file_bytes]
        more = file_shares(extra_bytes - layout.spare_bytes, rates, tuning.block_bytes)
        sizes = [have + add for have, add in zip(layout.file_bytes, more, strict=True)]
        engine.capacity_bytes, engine.checksum = sum(sizes), layout.checksum
        engine.tuning, space = tuning, Space(sizes, rates, tuning.block_bytes)
        files = reopen_files(paths, sizes, store.locks)
        engine._open(files, space, start, buffer_bytes, slow_after_s)
        try:
            engine._extents.adopt(layout, generation)
        except BaseException:
            engine.close()
            raise
        return engine

    def _open(
        self, files: list[StoreFile], space: Space, start: BackendFactory,
        buffer_bytes: int | None, slow_after_s: float,
    ) -> None:  # fmt: skip
        self._files = files
        where = ", ".join(str(file.directory) for file in files)
        self._extents = ExtentTable(space, self.tuning.block_bytes, where, checksum=self.checksum)
        self._buffer_limit, self._buffer_held = buffer_bytes, 0
        self._buffer_lock = threading.RLock()  # a lease may be collected while it is held
        try:
            mover = start([file.fd for file in self._files], self.tuning)
        except BaseException:
            for file in self._files:
                file.close()
            raise
        self._backend = mover
        self.backend = mover.name
        self._dispatcher = Dispatcher(
            mover, [str(file.path) for file in self._files], slow_after_s=slow_after_s
        )
        self._shut = weakref.finalize(self, shut_down, self._dispatcher, self._files, os.getpid())

    @property
    def disk_bytes(self) -> int:
        """What the store files take on disk now, in bytes."""
        return sum(file.disk_bytes for file in self._files)

    @property
    def owned_directories(self) -> tuple[Path, ...]:
        """Directories that no other store may use while this one is open."""
        return tuple(file.directory for file in self._files if not file.ephemeral)

    # -- places and memory ----------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Extent:
        """A place for ``nbytes`` bytes, in whole sectors of 4096; without contents.

        Raises:
            ValueError: ``nbytes`` is not positive.
            IoError: the store has no room; its need, what is free, and the remedy are named.
        """
        if nbytes <= 0:
            raise ValueError(f"an extent needs a positive number of bytes, not {nbytes}")
        self._require_open()
        return self._extents.allocate(nbytes)

    def grow(self, nbytes: int) -> None:
        """Makes room for ``nbytes`` more.  What lies beyond the items of a durable store is not
        part of it: it is gone when the store is opened again.

        Raises:
            IoError: a directory has not that much room.
        """
        self._require_open()
        self._extents.grow(nbytes, self._files)

    def reserve(self, extent: Extent) -> None:
        """Makes sure that a write of an extent finds room on disk, also where that is sparse.

        Raises:
            IoError: there is none.
        """
        self._require_open()
        for piece in extent.pieces:
            self._files[piece.file].reserve(piece.offset, piece.nbytes)

    def free(self, extent: Extent) -> None:
        """Gives an extent's place back.  What it held can no longer be read.

        Raises:
            OffloadError: a transfer to or from it is on its way.
            ValueError: it is not an extent of this engine, or has been freed.
        """
        self._extents.free(extent, self._dispatcher.busy_with)

    def buffer(self, nbytes: int) -> Lease:
        """Host memory that transfers like best: huge pages, aligned to 2 MiB.

        Raises:
            OffloadError: more than ``buffer_bytes`` would be out; release leases first.
        """
        with self._buffer_lock:
            limit = self._buffer_limit
            if limit is not None and self._buffer_held + nbytes > limit:
                raise LifecycleError(
                    f"a buffer needs {nbytes} bytes; {limit - self._buffer_held} of buffer_bytes="
                    f"{limit} are free; release leases, or raise buffer_bytes"
                )
            self._buffer_held += nbytes
        try:
            lease = allocate_host(nbytes, on_release=lambda: self._buffer_back(nbytes))
        except BaseException:
            self._buffer_back(nbytes)
            raise
        self.register(lease)
        return lease

    def register(self, lease: Lease) -> None:
        """Says that many transfers will use a lease of another's, as ``buffer`` does of its own.

        Saves CPU where io_uring may lock that much memory (``ulimit -l``); elsewhere it does
        nothing.  It ends with the lease.
        """
        mover = self._backend
        mover.add_memory(lease.address, lease.nbytes)
        known = lease.address, lease.nbytes, os.getpid()
        lease.before_release(partial(forget_memory, mover, *known))

    def unregister(self, lease: Lease) -> None:
        """Ends ``register`` for now.  The backend's thread unpins the pages soon after."""
        self._backend.drop_memory(lease.address, lease.nbytes)

    def register_again(self, lease: Lease) -> None:
        """Registers a lease after ``unregister``."""
        self._backend.add_memory(lease.address, lease.nbytes)

    def _buffer_back(self, nbytes: int) -> None:
        with self._buffer_lock:
            self._buffer_held -= nbytes

    # -- transfers ------------------------------------------------------------------------------

    def read(
        self,
        extent: Extent,
        buffer: Buffer,
        *,
        urgent: bool = False,
        on_done: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Starts to fill ``buffer`` with what ``extent`` holds.

        Args:
            extent: the source; it must have been written as a whole.
            buffer: a lease, a contiguous uint8 numpy array or a writable memoryview, at an address
                that is a multiple of 4096, of the extent's length or that rounded up to 4096.
                Until the ticket has ended, it must be neither used nor freed.
            urgent: overtake everything that is not urgent and has not started.
            on_done: called once, with the ticket, on the engine's own thread when it has ended; to
                be quick.  What it raises is logged, and raised by ``wait_all``.

        Raises:
            ValueError: the buffer does not fit, or the extent is not of this engine.
            OffloadError: the engine is closed.
        """
        return self._submit("read", extent, buffer, urgent, on_done)

    def write(
        self,
        extent: Extent,
        buffer: Buffer,
        *,
        urgent: bool = False,
        changing: bool = False,
        on_done: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Starts to write ``buffer`` to ``extent``.  Arguments and errors as for ``read``.

        ``changing``: others may write to the buffer meanwhile.  Which of their bytes the file then
        has is not said, but its checksums are right: each block is copied before it is summed.
        Without it, what is summed and what is written may differ.

        A ticket that ended well says that the file has the bytes; that they survive a power cut is
        said by ``flush``.
        """
        return self._submit("write", extent, buffer, urgent, on_done, changing)

    def _submit(
        self,
        kind: Direction,
        extent: Extent,
        buffer: Buffer,
        urgent: bool,
        on_done: Callable[[Ticket], None] | None,
        changing: bool = False,
    ) -> Ticket:
        self._require_open()
        contents = self._extents.contents(extent)
        segments, memory, tail = plan_transfer(
            kind, extent, buffer, contents.checksums, self.tuning.block_bytes, changing
        )
        parts = self._dispatcher
        ticket = Ticket(extent, kind, parts.on_own_thread, parts.cancel, parts.hurry, on_done)
        parts.submit(Flight(ticket, contents, segments, urgent, memory, tail))
        return ticket

    def flush(self) -> None:
        """Makes all that tickets have reported as written survive a power cut.

        Raises:
            IoError: a device refuses, or a store file was deleted.
        """
        self._require_open()
        for file in self._files:
            file.flush()

    def make_durable(
        self, items: Sequence[tuple[str, Sequence[Extent]]], description: Mapping[str, Any]
    ) -> Manifest:
        """Begin a manifest for extents of this engine; from now on the files stay after close.

        Args:
            items: the name and the alternating extents of each item.
            description: the meaning of the items, for readers of the store; JSON.

        Raises:
            IoError: the manifest cannot be written.
        """
        layout = StoreLayout(
            uuid.uuid4().hex, tuple(str(file.directory) for file in self._files),
            tuple(file.nbytes for file in self._files), self.tuning.block_bytes, self.checksum,
            tuple(StoredItem(key, extents[0].nbytes, tuple(extents)) for key, extents in items),
            description,
        )  # fmt: skip
        self.flush()
        manifest = Manifest.create(layout)
        for file in self._files:
            file.keep = True
        return manifest

    def make_ephemeral(self, manifest: Manifest) -> None:
        """Takes ``make_durable`` back: nothing stays after close."""
        manifest.remove()
        for file in self._files:
            file.keep = False

    def checksums(self, extent: Extent) -> NDArray[np.uint32] | None:
        """A copy of the CRC-32 of each block, as last written; ``None`` where checking is off."""
        kept = self._extents.contents(extent).checksums
        return None if kept is None else kept.copy()

    def holds(self, extent: Extent, array: NDArray[np.uint8]) -> bool:
        """Whether an array is what was last written to an extent, by its checksums; True where
        checking is off.

        Args:
            array: flat, of the extent's length in whole sectors.
        """
        sums = self.checksums(extent)
        if sums is None:
            return True
        blocks = (part for run in runs_of(extent) for part in cut(run[2], self.tuning.block_bytes))
        at = 0
        for nbytes, expected in zip(blocks, sums, strict=True):
            if crc32(array[at : at + nbytes]) != expected:
                return False
            at += nbytes
        return True

    def wait_all(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            OffloadError: the first failure that neither ``wait`` nor ``on_done`` has reported.
            Exception: what an ``on_done`` raised.
        """
        self._dispatcher.wait_all()

    # -- the whole ------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Room for further extents."""
        return self._extents.free_bytes

    @property
    def stats(self) -> IoStats:
        """Totals since the engine was opened."""
        lanes = tuple(
            IoLaneStats(
                str(file.path), counts.bytes_read, counts.bytes_written, counts.blocks_read,
                counts.blocks_written, counts.retries, counts.busy_ns / 1e9, counts.in_flight,
                counts.queued,
            )
            for file, counts in zip(self._files, self._backend.stats(), strict=True)
        )  # fmt: skip
        return IoStats(
            bytes_read=sum(lane.bytes_read for lane in lanes),
            bytes_written=sum(lane.bytes_written for lane in lanes),
            engine_port=self._dispatcher.engine_port,
            failures=self._dispatcher.failures,
            retries=sum(lane.retries for lane in lanes),
            busy_s=sum(lane.busy_s for lane in lanes),
            lanes=lanes,
        )

    def latencies(self) -> list[int]:
        """How many transfers of one block took how long, since the engine was opened.

        Step k counts those of ``2**(k/4)`` nanoseconds and more, but less than the next step's.
        """
        return self._backend.latencies()

    def close(self) -> None:
        """Lets everything on its way end, joins the threads, removes files that are not to stay.

        A second call does nothing.  Transfers stuck in the kernel are given up after a time in
        which nothing moves: their tickets then end with an error.
        """
        if self._shut.alive and self._dispatcher.on_own_thread():
            raise RuntimeError("close() inside on_done would wait for itself for ever")
        self._shut()

    @property
    def closed(self) -> bool:
        return not self._shut.alive

    def __enter__(self) -> IoEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self.closed:
            raise LifecycleError("the I/O engine is closed; open a new one")


def open_backend(fds: Sequence[int], tuning: Tuning) -> Backend:
    """Starts the backend that ``tuning`` names, over open files.

    Raises:
        RuntimeError: a part that it needs is not installed.
    """
    if tuning.backend == "aiofiles":
        return AiofilesBackend(fds, tuning)
    return NativeBackend.start(fds, tuning)
