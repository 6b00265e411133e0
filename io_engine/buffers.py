"""Host memory for transfers: anonymous maps, aligned to and backed by 2 MiB pages.

Huge pages are the largest single gain in direct I/O: the kernel pins one page instead of 512.
A forked child does not have them: touching one there ends the child.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import HostMemoryError

HUGE_PAGE_BYTES = 2 << 20
POPULATED_BYTES = 256 << 20  # at a time, by one of a few threads
MOST_WORKERS = 16

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
_MAP_NORESERVE = 0x4000
_MAP_SHARED_FIXED = 0x01 | 0x10
_MADV_DONTNEED = 4
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _unmap(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes) != 0:
        code = ctypes.get_errno()
        raise HostMemoryError(
            f"the system refused to release {nbytes} bytes of host memory: {os.strerror(code)}"
        )


def _end(
    owner: int,
    address: int,
    nbytes: int,
    before: list[Callable[[], None]],
    on_release: Callable[[], None] | None,
) -> None:
    if os.getpid() != owner:
        return  # a forked child has no mapping there, but maybe its own memory
    for act in before:
        act()
    _unmap(address, nbytes)
    if on_release is not None:
        on_release()


class _Mapping:
    """Pages that numpy arrays are views of; unmapped on ``close``, or with the last view."""

    def __init__(
        self, nbytes: int, on_release: Callable[[], None] | None, *, populate: bool
    ) -> None:
        self.nbytes = nbytes
        whole = nbytes + HUGE_PAGE_BYTES
        flags = _MAP_PRIVATE_ANONYMOUS | (0 if populate else _MAP_NORESERVE)
        base = _libc.mmap(None, whole, _PROT_READ_WRITE, flags, -1, 0)
        if base == _MAP_FAILED:
            code = ctypes.get_errno()
            raise HostMemoryError(
                f"host memory: no address range of {nbytes} bytes is free: {os.strerror(code)}; "
                "use a smaller budget, or raise the address space limit (ulimit -v)"
            )
        self.address = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if self.address > base:
            _unmap(base, self.address - base)
        if base + whole > self.address + nbytes:
            _unmap(self.address + nbytes, base + whole - self.address - nbytes)
        self._lock = threading.Lock()
        self._transfers = 0  # on their way
        self._released = False
        self.file_bytes = 0  # at the start, where a file is mapped
        self.before_end: list[Callable[[], None]] = []
        self.close = weakref.finalize(
            self, _end, os.getpid(), self.address, nbytes, self.before_end, on_release
        )
        self.close.atexit = False  # the process's end frees it, and threads may still be using it
        # Forked children have no use for it; that they share it would have every page copied that
        # is written while they live, and locked pages copied at the fork.
        if _libc.madvise(self.address, nbytes, _MADV_DONTFORK) != 0:
            code = ctypes.get_errno()
            self.close()
            raise HostMemoryError(
                f"cannot exclude {nbytes} bytes of host memory from child processes: "
                f"{os.strerror(code)}"
            )
        # Refused where huge pages are switched off: smaller pages then serve.
        _libc.madvise(self.address, nbytes, _MADV_HUGEPAGE)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def begin_transfer(self) -> None:
        """Keep the memory mapped until ``end_transfer``."""
        with self._lock:
            self._transfers += 1

    def end_transfer(self) -> None:
        with self._lock:
            self._transfers -= 1
            over = self._released and not self._transfers
        if over:
            self.close()

    def release(self) -> None:
        """Unmaps it, as soon as no transfer is on its way."""
        with self._lock:
            self._released = True
            over = not self._transfers
        if over:
            self.close()

    def populate(self) -> None:
        """Allocate the pages now rather than in the first transfer, on all processors.

        The kernel zeroes them, which takes a second for each 1 to 4 GB on one processor.
        """
        starts = range(0, self.nbytes, POPULATED_BYTES)
        if len(starts) == 1:
            code = self._populate(0)
        else:
            workers = min(len(starts), len(os.sched_getaffinity(0)), MOST_WORKERS)
            pool = ThreadPoolExecutor(workers, "overspill-populate")
            try:
                code = next(filter(None, pool.map(self._populate, starts)), 0)
            finally:  # no pages are allocated in memory that an interrupt frees
                pool.shutdown(cancel_futures=True)
        if code == 0:
            return
        if code == 22:  # EINVAL: a kernel before 5.14
            np.asarray(self)[self.file_bytes :: os.sysconf("SC_PAGE_SIZE")] = 0
            return
        raise HostMemoryError(
            f"host memory: need {self.nbytes} bytes, but less is free: {os.strerror(code)}; lower "
            "host_memory, or raise the memory limit of the control group"
        )

    def _populate(self, start: int) -> int:
        """Takes the pages of one part; the error number, or 0."""
        nbytes = min(POPULATED_BYTES, self.nbytes - start)
        failed = _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_WRITE) != 0
        return ctypes.get_errno() if failed else 0


class Lease:
    """Ownership of a piece of host memory, until ``release`` or the end of a ``with`` block.

    ``release`` returns the pages to the system at once, or after the last transfer that is on its
    way, whether views of ``array`` are alive or not; touching such a view afterwards is an error
    that ends the process (a segmentation fault).  A lease that is simply dropped lives on until its
    last view is gone.
    """

    def __init__(self, mapping: _Mapping, nbytes: int) -> None:
        self._mapping: _Mapping | None = mapping
        self._array: NDArray[np.uint8] | None = np.asarray(mapping)[:nbytes]
        self.address, self.nbytes = mapping.address, nbytes

    @property
    def array(self) -> NDArray[np.uint8]:
        """The whole memory, shape ``(nbytes,)``, dtype uint8, writable.

        Raises:
            OffloadError: the lease has been released.
        """
        if self._array is None:
            raise HostMemoryError(f"the lease of {self.nbytes} bytes has been released")
        return self._array

    @property
    def view(self) -> memoryview:
        """Return the memory for functions that take a buffer, such as ``torch.frombuffer``.

        It is writable.

        Raises:
            OffloadError: the lease has been released.
        """
        return self.array.data

    @property
    def released(self) -> bool:
        return self._mapping is None

    def resident_bytes(self) -> int:
        """Return how many bytes of the buffer have pages; untouched memory has none yet."""
        if self._mapping is None:
            return 0
        page = os.sysconf("SC_PAGE_SIZE")
        there = np.zeros(-(-self._mapping.nbytes // page), np.uint8)
        if _libc.mincore(self.address, self._mapping.nbytes, there.ctypes.data) != 0:
            return 0  # it has been returned meanwhile
        return page * int(np.count_nonzero(there & 1))

    def discard(self) -> None:
        """Frees the pages and keeps the addresses; later reads return zeros.

        No transfer may be on its way.  Pages that are pinned, as by ``IoEngine.register``, are
        freed once they are unpinned.

        Raises:
            OffloadError: the pages are locked with ``mlock``.
        """
        mapping = self._mapping
        if mapping is None:
            return
        if _libc.madvise(mapping.address, mapping.nbytes, _MADV_DONTNEED) != 0:
            code = ctypes.get_errno()
            raise HostMemoryError(
                f"the system refused to unmap {mapping.nbytes} bytes of host memory: "
                f"{os.strerror(code)}"
            )

    def populate(self) -> None:
        """Allocates all pages now, as ``allocate_host`` does, such as after ``discard``.

        Raises:
            OffloadError: the system has not that much memory to give.
        """
        if self._mapping is not None:
            self._mapping.populate()

    def map_file(self, descriptor: int, nbytes: int) -> None:
        """Maps a file in place of the first ``nbytes``, whole pages that nothing has used yet.

        Other processes that map the file see what is written there.

        Raises:
            OffloadError: the system refuses it; the lease must then be released.
        """
        if self._mapping is None:
            raise HostMemoryError(f"the lease of {self.nbytes} bytes has been released")
        self._mapping.file_bytes = nbytes
        place = _libc.mmap(self.address, nbytes, _PROT_READ_WRITE, _MAP_SHARED_FIXED, descriptor, 0)
        if place == _MAP_FAILED or _libc.madvise(self.address, nbytes, _MADV_DONTFORK) != 0:
            code = ctypes.get_errno()
            raise HostMemoryError(f"cannot map {nbytes} bytes of a file: {os.strerror(code)}")
        _libc.madvise(self.address, nbytes, _MADV_HUGEPAGE)

    def before_release(self, act: Callable[[], None]) -> None:
        """Has ``act`` called before the memory is returned, by whom and whenever that is done.

        Raises:
            OffloadError: the lease has been released.
        """
        if self._mapping is None:
            raise HostMemoryError(f"the lease of {self.nbytes} bytes has been released")
        self._mapping.before_end.append(act)

    def release(self) -> None:
        """Returns the memory.  A second call does nothing."""
        mapping, self._mapping, self._array = self._mapping, None, None
        if mapping is not None:
            mapping.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class TransferMemory:
    """What a transfer reads or fills, kept as long as this object lives: a lease that is released
    meanwhile, as by an exception, is unmapped only then."""

    __slots__ = ("_kept", "_mapping")

    def __init__(self, array: NDArray[np.uint8], *others: object) -> None:
        """``others`` are kept too."""
        self._kept, self._mapping = (array, *others), _mapping_of(array)
        if self._mapping is not None:
            self._mapping.begin_transfer()

    def __del__(self) -> None:
        if self._mapping is not None:
            self._mapping.end_transfer()


def _mapping_of(array: NDArray[np.uint8]) -> _Mapping | None:
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, _Mapping) else None


def allocate_host(
    nbytes: int, *, populate: bool = True, on_release: Callable[[], None] | None = None
) -> Lease:
    """Host memory of ``nbytes`` bytes, zeroed, at a multiple of 2 MiB, on huge pages if possible.

    The system gives whole pages: up to 2 MiB more than asked for are taken.  ``populate`` takes
    them now; ``on_release`` is called once, when they have been returned.

    Raises:
        ValueError: ``nbytes`` is not positive.
        OffloadError: the system has not that much memory to give.
    """
    if nbytes <= 0:
        raise ValueError(f"a buffer needs a positive number of bytes, not {nbytes}")
    granule = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else os.sysconf("SC_PAGE_SIZE")
    mapping = _Mapping(-(-nbytes // granule) * granule, on_release, populate=populate)
    if populate:
        mapping.populate()
    return Lease(mapping, nbytes)
