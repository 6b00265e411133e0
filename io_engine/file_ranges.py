"""Reads ranges of the user's files, each to its own place in memory.

Tensors lie at arbitrary offsets in such files, and direct I/O reads whole sectors.  So blocks are
read into the reader's memory, and the ranges are copied from there.  Each read verifies that the
contents are those of the first read.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .buffers import Lease, allocate_host
from .errors import CorruptionError, IoError, LifecycleError, OffloadError, refused
from .native import crc32
from .one_shot_event import OneShotEvent
from .types import SECTOR_BYTES

log = logging.getLogger("overspill.io_engine")
Bytes = NDArray[np.uint8]

# How ranges are cut into blocks, whose checksums digests are made of: both stay as they are, or
# stores no longer know their files.
BLOCK_BYTES = 4 << 20  # that each thread reads at a time: smaller ones are slower on most disks
GAP_BYTES = 64 << 10  # between ranges, read along with them
LEAST_THREADS, MOST_THREADS = 2, 8
SHARE = 32  # of host memory, that reads may come through
BOUNCE_BYTES = BLOCK_BYTES + 2 * SECTOR_BYTES  # of every thread


def threads_for(host_bytes: int) -> int:
    """How many threads read where so much host memory may be taken for all."""
    return max(LEAST_THREADS, min(MOST_THREADS, host_bytes // (SHARE * BOUNCE_BYTES)))


def held_bytes(threads: int) -> int:
    """What a reader holds."""
    return threads * BOUNCE_BYTES


@dataclass(frozen=True)
class FilePart:
    """``nbytes`` of file number ``file`` from ``offset`` on, and where ``to`` in the buffer."""

    file: int
    offset: int
    nbytes: int
    to: int


@dataclass(frozen=True)
class FileRanges:
    """All that fills one buffer of ``nbytes``; what no part fills there stays as it is.

    Two are equal if they have the same ``number``.
    """

    number: int
    nbytes: int
    parts: tuple[FilePart, ...]

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileRanges) and other.number == self.number

    @property
    def payload_bytes(self) -> int:
        """What is read."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class _Block:
    """Bytes ``[low, high)`` of a file; of these, what goes where: (from, to, bytes)."""

    file: int
    low: int
    high: int
    pieces: tuple[tuple[int, int, int], ...]


def _cut(parts: Sequence[FilePart]) -> tuple[_Block, ...]:
    """Blocks of at most ``BLOCK_BYTES``, in the order of the files."""
    found: list[_Block] = []
    file, low, high, pieces = -1, 0, 0, list[tuple[int, int, int]]()

    def end() -> None:
        if pieces:
            found.append(_Block(file, low, high, tuple(pieces)))

    for part in sorted(parts, key=lambda p: (p.file, p.offset)):
        at, to, stop = part.offset, part.to, part.offset + part.nbytes
        while at < stop:
            far = at < low or at - high > GAP_BYTES or at - low >= BLOCK_BYTES
            if part.file != file or far:
                end()
                file, low, high, pieces = part.file, at, at, []
            nbytes = min(stop, low + BLOCK_BYTES) - at
            pieces.append((at - low, to, nbytes))
            at, to = at + nbytes, to + nbytes
            high = max(high, at)
    end()
    return tuple(found)


class RangesRead:
    """A read that is under way; as a ``Ticket``."""

    def __init__(
        self, ranges: FileRanges, buffer: Bytes | None, blocks: Sequence[_Block],
        on_done: Callable[[RangesRead], None] | None,
    ) -> None:  # fmt: skip
        self.ranges, self.buffer, self.nbytes = ranges, buffer, ranges.payload_bytes
        self.error: OffloadError | None = None
        self.started_ns = self.finished_ns = 0
        self.blocks, self.next, self.left = blocks, 0, len(blocks)
        self._on_done, self._ended = on_done, OneShotEvent()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Returns once it has ended well.

        Raises:
            IoError: it failed.
            CorruptionError: the file is not what it was.
        """
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """End the read and call ``on_done``; only for the reader."""
        self.finished_ns = time.perf_counter_ns()
        on_done, self._on_done = self._on_done, None
        self._ended.set()
        if on_done is not None:
            on_done(self)


class FileState(NamedTuple):
    """What tells that a file is another one, or was written to."""

    nbytes: int
    mtime_ns: int
    inode: int


def state_of(file: int | Path) -> FileState:
    """Of a file now, by its path or descriptor."""
    found = os.stat(file)
    return FileState(found.st_size, found.st_mtime_ns, found.st_ino)


class _File:
    """An open file, and what it was when it was opened, or before."""

    def __init__(self, path: Path, was: FileState | None, *, direct: bool) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            try:
                self.fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.warning("%s: no direct I/O here; reads go through the page cache", path)
                self.fd = os.open(path, flags)
        except OSError as error:
            raise refused(path, "it cannot be opened to read", error) from error
        self._was = was or state_of(self.fd)

    @property
    def nbytes(self) -> int:
        """As it was."""
        return self._was.nbytes

    @property
    def changed(self) -> bool:
        """Whether the file was written to or replaced since it was opened."""
        return state_of(self.fd) != self._was


class RangeReader:
    """Reads ``FileRanges`` of a set of files on threads of its own.  Close it.

    All methods may be called from any thread.
    """

    def __init__(
        self, files: Sequence[Path], *, was: Sequence[FileState] | None = None,
        checksum: bool = True, threads: int = LEAST_THREADS, direct: bool = True,
    ) -> None:  # fmt: skip
        """Open the files and start the threads.

        ``was``: each file's identity when its layout was read.  ``direct``: read past the page
        cache.  Processes that read the same ranges at about the same time read them once from disk
        if it is false.

        Raises:
            IoError: a file cannot be opened.
        """
        self.checksum = checksum
        self._files: list[_File] = []
        self._lease: Lease | None = None
        self._threads: list[threading.Thread] = []
        self._jobs: list[tuple[bool, int, RangesRead]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._blocks: dict[FileRanges, tuple[_Block, ...]] = {}
        self._sums: dict[FileRanges, list[int | None]] = {}  # by block, as first read
        self._expected: dict[FileRanges, int] = {}
        try:
            for number, path in enumerate(files):
                state = None if was is None else was[number]
                self._files.append(_File(path, state, direct=direct))
            self._lease = allocate_host(held_bytes(threads))  # together, as pages are huge
            for number in range(threads):
                bounce = self._lease.array[number * BOUNCE_BYTES :][:BOUNCE_BYTES]
                thread = threading.Thread(
                    target=self._run, args=(bounce,), name=f"overspill-ranges-{number}",
                    daemon=True,
                )  # fmt: skip
                self._threads.append(thread)
                thread.start()
        except BaseException:
            self.close()
            raise

    def read(
        self, ranges: FileRanges, buffer: Bytes, *, urgent: bool = False,
        on_done: Callable[[RangesRead], None] | None = None,
    ) -> RangesRead:  # fmt: skip
        """Starts to fill ``buffer``, flat uint8 of ``ranges.nbytes`` or more.

        ``urgent``: ahead of all that is not.  ``on_done``: called once, on a thread of the
        reader's, when it has ended.

        Raises:
            OffloadError: the reader is closed.
            ValueError: the buffer is too small.
        """
        if buffer.nbytes < ranges.nbytes:
            raise ValueError(f"ranges of {ranges.nbytes} bytes, into {buffer.nbytes}")
        return self._begin(ranges, buffer, urgent, on_done)

    def _begin(
        self, ranges: FileRanges, buffer: Bytes | None, urgent: bool,
        on_done: Callable[[RangesRead], None] | None,
    ) -> RangesRead:  # fmt: skip
        with self._changed:
            if self._closed:
                raise LifecycleError("the reader of weight files is closed")
            blocks = self._blocks.get(ranges)
            if blocks is None:
                blocks = self._blocks[ranges] = _cut(ranges.parts)
                self._sums[ranges] = [None] * len(blocks)
            job = RangesRead(ranges, buffer, blocks, on_done)
            job.started_ns = time.perf_counter_ns()
            if blocks:
                heapq.heappush(self._jobs, (not urgent, next(self._numbers), job))
                self._changed.notify_all()
        if not blocks:
            job.finish()
        return job

    def check(self, ranges: FileRanges) -> None:
        """Reads all once, to nowhere.

        Raises:
            IoError: it cannot be read.
            CorruptionError: it is not what it was.
        """
        self._begin(ranges, None, False, None).wait()

    def digest(self, ranges: FileRanges) -> int | None:
        """A checksum of all that ``ranges`` had when they were first read; ``None``: they were not
        yet, or nothing is checked."""
        sums = self._sums.get(ranges)
        if not self.checksum or sums is None or None in sums:
            return self._expected.get(ranges)
        return crc32(np.array(sums, np.uint32).view(np.uint8))

    def expect(self, ranges: FileRanges, digest: int) -> None:
        """Set the ``digest`` of an earlier process, which the first read must match."""
        self._expected[ranges] = digest

    # -- on the threads -------------------------------------------------------------------------

    def _run(self, bounce: Bytes) -> None:
        while (taken := self._take()) is not None:
            job, number = taken
            error: OffloadError | None = None
            if job.error is None:  # else the rest is of no use
                try:
                    self._fill(job, number, bounce)
                except OffloadError as raised:
                    error = raised
                except BaseException as raised:
                    error = IoError(f"{type(raised).__name__}: {raised}")
            with self._changed:
                job.error = job.error or error
                job.left -= 1
                over = not job.left
            if over:
                self._end(job)
            del job, taken

    def _take(self) -> tuple[RangesRead, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            job = self._jobs[0][2]
            number, job.next = job.next, job.next + 1
            if job.next == len(job.blocks):
                heapq.heappop(self._jobs)
            return job, number

    def _end(self, job: RangesRead) -> None:
        expected = self._expected.get(job.ranges)
        if job.error is None and expected is not None and self.checksum:
            found = self.digest(job.ranges)
            if found != expected:
                job.error = self._other(job.blocks[0], "since the store was made")
        try:
            job.finish()
        except BaseException:
            log.exception("what was to follow a read of weight files raised")

    def _fill(self, job: RangesRead, number: int, bounce: Bytes) -> None:
        """Reads a block, checks it, and copies its pieces to their places."""
        block, file = job.blocks[number], self._files[job.blocks[number].file]
        sums = self._sums[job.ranges]
        if self.checksum and sums[number] is None and file.changed:
            raise self._other(block, "since its header was read")
        start = block.low // SECTOR_BYTES * SECTOR_BYTES
        self._read(file, start, block.high - start, bounce)
        data = bounce[block.low - start : block.high - start]
        if self.checksum:
            found = crc32(data)
            if sums[number] is None:
                sums[number] = found
            elif sums[number] != found:
                raise self._other(block, "since it was first read")
        if job.buffer is None:
            return
        source, target = data.ctypes.data, job.buffer.ctypes.data
        for at, to, nbytes in block.pieces:
            ctypes.memmove(target + to, source + at, nbytes)  # without the GIL

    @staticmethod
    def _read(file: _File, start: int, nbytes: int, bounce: Bytes) -> None:
        """At least ``nbytes`` from ``start`` on, which begins a sector."""
        whole = bounce.data[: -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES]
        have = 0
        while have < nbytes:
            try:
                got = os.preadv(file.fd, [whole[have:]], start + have)
            except OSError as error:
                raise refused(file.path, f"a read of {nbytes} bytes at {start}", error) from error
            # What follows a short read begins a sector again; at the end of a file there is none.
            whole_sectors = got // SECTOR_BYTES * SECTOR_BYTES
            if have + got < nbytes and not whole_sectors:
                raise IoError(
                    f"{file.path}: is shorter than {start + nbytes} bytes, so it is incomplete or "
                    "was truncated; get it again", path=str(file.path), offset=start,
                    nbytes=nbytes,
                )  # fmt: skip
            have += got if have + got >= nbytes else whole_sectors

    def _other(self, block: _Block, when: str) -> CorruptionError:
        path = self._files[block.file].path
        return CorruptionError(
            f"{path}: {block.high - block.low} bytes at offset {block.low} have changed {when}, "
            "and weights are read from there as they are needed: put the file back as it was, or "
            "wrap the model again", path=str(path), offset=block.low, nbytes=block.high - block.low,
        )  # fmt: skip

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets what was begun end, joins the threads and closes the files.  A second call does
        nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        self._threads.clear()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        for file in self._files:
            os.close(file.fd)
        self._files.clear()
