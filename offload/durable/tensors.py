"""Tensors that are written to files in parts, so that none is in memory as a whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from ..io_engine.errors import refused
from ..io_engine.native import crc32
from ..io_engine.one_shot_event import OneShotEvent
from ..io_engine.store_file import reserve
from ..io_engine.types import SECTOR_BYTES
from ..planning.sections import joined
from .sums import Written

PART_BYTES = 2 << 20  # fits in a CPU cache between its stages
STAGE_BYTES = 8 << 20  # size of one write
STAGES = 3  # one is filled while two are written
AHEAD_BYTES = 32 << 20  # of parts requested before they are needed
AHEAD_PARTS = 24  # and their number: each holds at least a whole block of the store
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """Bytes that may still be in transfer from a disk; ``take``, called once, waits for them."""

    nbytes: int
    take: Callable[[], Bytes]


@dataclass(frozen=True)
class StreamedTensor:
    """A dense tensor; ``parts`` requests its bytes in order, a few MiB at a time."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def bytes_of(value: torch.Tensor) -> Bytes:
    """Return a tensor's bytes, flat; a view if it is dense and on the CPU."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def lazy(
    name: str, dtype: torch.dtype, shape: Sequence[int], value: Callable[[], torch.Tensor]
) -> StreamedTensor:
    """Make a tensor whose ``value`` is called when its first part is taken.

    The value must not change after that.
    """
    size = tuple(shape)
    nbytes = torch.Size(size).numel() * dtype.itemsize

    def parts() -> Iterator[Part]:
        data: list[Bytes] = []  # set by the first part, dropped by the last

        def take(start: int, stop: int) -> Bytes:
            if not start:
                made = value()
                if made.dtype != dtype or tuple(made.shape) != size:
                    raise ValueError(
                        f"{name}: expected {dtype} {size}, got {made.dtype} {made.shape}"
                    )
                data.append(bytes_of(made))
            return (data[0] if stop < nbytes else data.pop())[start:stop]

        for start in range(0, nbytes or 1, PART_BYTES):  # an empty tensor has one part, too
            stop = min(start + PART_BYTES, nbytes)
            yield Part(stop - start, partial(take, start, stop))

    return StreamedTensor(name, dtype, size, parts)


def in_memory(name: str, value: torch.Tensor) -> StreamedTensor:
    """Make a streamed tensor of one in memory."""
    return lazy(name, value.dtype, value.shape, lambda: value)


def whole_stacks(tensors: Iterable[StreamedTensor]) -> list[StreamedTensor]:
    """Return the tensors, with the sections of each stack of experts joined."""
    return list(joined({each.name: each for each in tensors}, one_after_the_other).values())


def one_after_the_other(name: str, parts: Sequence[StreamedTensor]) -> StreamedTensor:
    """Concatenate tensors along their rows."""
    first = parts[0]
    if not first.shape:  # a scalar, equal in all parts
        return StreamedTensor(name, first.dtype, (), first.parts)
    shape = (sum(each.shape[0] for each in parts), *first.shape[1:])
    return StreamedTensor(
        name, first.dtype, shape, lambda: itertools.chain.from_iterable(p.parts() for p in parts)
    )


def stream(tensors: Iterable[StreamedTensor]) -> Iterator[Bytes]:
    """Yield the bytes of the tensors in order; parts are requested ahead, across tensors."""
    parts = (part for tensor in tensors for part in tensor.parts())
    begun: deque[Part] = deque()
    ahead = 0
    for part in parts:
        begun.append(part)
        ahead += part.nbytes
        while ahead > AHEAD_BYTES or len(begun) > AHEAD_PARTS:
            ahead -= begun[0].nbytes
            yield begun.popleft().take()
    while begun:
        yield begun.popleft().take()


class FileWriter:
    """Writes a draft from start to end on its own thread, and computes its checksum.

    See Note [Atomic writes]: until it is finished the file has its full length, and holes.

    Bypasses the page cache where the file system allows it: the data is not read again, and the
    final flush then has nothing to wait for.  At most four parts are queued, so memory is bounded.
    ``finish`` raises the error of the thread, such as ``IoError`` after a failed write.
    """

    def __init__(self, path: Path, nbytes: int, *, over: bool = False) -> None:
        """
        Args:
            nbytes: the final size, allocated first, because file systems serialise writes beyond
                the end of a file.
            over: whether the file exists already, and what ``keep`` covers stays unchanged.
        """
        self._path, self._need_bytes = path, nbytes
        self._fd = _open(path, nbytes, 0 if over else os.O_CREAT | os.O_EXCL)
        self._before: BinaryIO | None = path.open("rb") if over else None
        self._stages: deque[tuple[Bytes, Future[None] | None]] = deque(
            (np.frombuffer(mmap.mmap(-1, STAGE_BYTES), np.uint8), None) for _ in range(STAGES)
        )
        self._writers = ThreadPoolExecutor(STAGES - 1, "overspill-export-write")
        self._held = self._at = 0  # bytes in the stage, and their file offset
        self._queue: queue.Queue[Bytes | int | None] = queue.Queue(4)
        self._error: BaseException | None = None
        self._crc = self._nbytes = 0
        self._ended = OneShotEvent()
        thread = threading.Thread(target=self._run, name="overspill-export", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._queue.put(None)  # interrupted: the thread may be running
            if thread.ident is None:
                self._close()
            raise

    def write(self, data: Bytes) -> None:
        """Queue the next bytes; the caller must not change them any more."""
        self._raise()
        self._queue.put(data)

    def keep(self, nbytes: int) -> None:
        """Keep the next bytes as they are in the file, and include them in the checksum."""
        self._queue.put(nbytes)

    def finish(self) -> Written:
        """Wait for all writes, flush to disk and close.

        Raises:
            IoError: a write failed.
        """
        self._end()
        self._raise()
        return Written(self._nbytes, self._crc)

    def abort(self) -> None:
        """End the thread and close the file, in any state."""
        self._error = self._error or InterruptedError("the export was given up")
        self._end()

    def _end(self) -> None:
        """End the thread and wait for it.  Can be repeated after an interrupt."""
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)
                self._ended.wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write_all()
            self._close()
        except BaseException as error:
            self._error = self._error or self._named(error)
        finally:
            self._ended.set()

    def _close(self) -> None:
        self._writers.shutdown()
        if self._before is not None:
            self._before.close()
        os.close(self._fd)

    def _write_all(self) -> None:
        while (data := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._take(data)
                except BaseException as error:  # raised in the calling thread
                    self._error = self._named(error)
        if self._error is None:
            try:
                self._put(self._held + -self._held % SECTOR_BYTES)
                for _, under_way in self._stages:
                    if under_way is not None:
                        under_way.result()
                os.ftruncate(self._fd, self._nbytes)
                os.fsync(self._fd)
            except BaseException as error:
                self._error = self._named(error)

    def _named(self, error: BaseException) -> BaseException:
        """Add the file's path to an error of the operating system."""
        if not isinstance(error, OSError):
            return error
        named = refused(self._path, "cannot write", error, need_bytes=self._need_bytes)
        named.__cause__ = error
        return named

    def _take(self, data: Bytes | int) -> None:
        if isinstance(data, int):
            assert self._before is not None
            self._before.seek(self._nbytes)
            data = np.frombuffer(self._before.read(data), np.uint8)
        self._crc = crc32(data, self._crc)
        self._nbytes += data.size
        while data.size:
            room = min(STAGE_BYTES - self._held, data.size)
            self._stages[0][0][self._held : self._held + room] = data[:room]
            self._held, data = self._held + room, data[room:]
            if self._held == STAGE_BYTES:
                self._put(STAGE_BYTES)

    def _put(self, nbytes: int) -> None:
        """Start writing the first stage's bytes, and wait until the next stage is free."""
        stage, _ = self._stages.popleft()
        self._stages.append((stage, self._writers.submit(self._write, stage[:nbytes], self._at)))
        self._at, self._held = self._at + nbytes, 0
        under_way = self._stages[0][1]
        if under_way is not None:
            under_way.result()

    def _write(self, data: Bytes, at: int) -> None:
        done = 0
        while done < data.size:
            done += os.pwrite(self._fd, data[done:].data, at + done)


def _open(path: Path, nbytes: int, create: int) -> int:
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | create
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # no direct I/O on this file system
            raise
        if create:
            path.unlink(missing_ok=True)  # created before direct I/O was refused
        fd = os.open(path, flags, 0o666)
    try:
        if nbytes:
            reserve(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise refused(path, "cannot write", error, need_bytes=nbytes) from error
    return fd
