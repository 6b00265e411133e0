"""Tensors that are written in parts, so that none is ever whole in memory."""

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
from ..io_engine.store import reserve
from ..io_engine.types import SECTOR_BYTES
from ..planning.sections import joined
from .sums import Written

PART_BYTES = 2 << 20  # stays in a cache on its way
STAGE_BYTES = 8 << 20  # one write
STAGES = 3  # one is filled, two are on their way
AHEAD_BYTES = 32 << 20  # of parts that are begun before they are needed
AHEAD_PARTS = 24  # of them: each holds a whole block of the store, however small it is
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """Bytes that may still be on their way from a disk; ``take`` waits for them, and is called
    once."""

    nbytes: int
    take: Callable[[], Bytes]


@dataclass(frozen=True)
class StreamedTensor:
    """A dense tensor: ``parts`` begins its bytes in order, a few MiB at a time."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def bytes_of(value: torch.Tensor) -> Bytes:
    """A tensor's bytes, flat; a view where it is dense and on the CPU."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def lazy(
    name: str, dtype: torch.dtype, shape: Sequence[int], value: Callable[[], torch.Tensor]
) -> StreamedTensor:
    """A tensor that ``value`` makes when its turn comes, and that must not change after that."""
    size = tuple(shape)
    nbytes = torch.Size(size).numel() * dtype.itemsize

    def parts() -> Iterator[Part]:
        data: list[Bytes] = []  # made when the first part is taken, gone with the last

        def take(start: int, stop: int) -> Bytes:
            if not start:
                made = value()
                if made.dtype != dtype or tuple(made.shape) != size:
                    raise ValueError(
                        f"{name}: expected {dtype} {size}, got {made.dtype} {made.shape}"
                    )
                data.append(bytes_of(made))
            return (data[0] if stop < nbytes else data.pop())[start:stop]

        for start in range(0, nbytes or 1, PART_BYTES):  # one that is empty is asked for too
            stop = min(start + PART_BYTES, nbytes)
            yield Part(stop - start, partial(take, start, stop))

    return StreamedTensor(name, dtype, size, parts)


def in_memory(name: str, value: torch.Tensor) -> StreamedTensor:
    """A tensor that is there already."""
    return lazy(name, value.dtype, value.shape, lambda: value)


def whole_stacks(tensors: Iterable[StreamedTensor]) -> list[StreamedTensor]:
    """The same tensors, with stacks of experts whole that a model has in sections."""
    return list(joined({each.name: each for each in tensors}, one_after_the_other).values())


def one_after_the_other(name: str, parts: Sequence[StreamedTensor]) -> StreamedTensor:
    """A tensor whose rows are those of several."""
    first = parts[0]
    if not first.shape:  # a single number, which one has
        return StreamedTensor(name, first.dtype, (), first.parts)
    shape = (sum(each.shape[0] for each in parts), *first.shape[1:])
    return StreamedTensor(
        name, first.dtype, shape, lambda: itertools.chain.from_iterable(p.parts() for p in parts)
    )


def stream(tensors: Iterable[StreamedTensor]) -> Iterator[Bytes]:
    """The bytes of the tensors, one after the other; what comes next is begun before it is needed,
    also where another tensor or field begins."""
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
    """Writes a draft from its start to its end on a thread of its own, and sums it up.

    See Note [Atomic writes]: until it is finished the file has its full length, and holes.

    Past the page cache, where the file system can: what is written is not read again, and the
    flush at the end then waits for nothing.  At most four parts wait, so memory is bounded;
    ``finish`` raises what went wrong: ``IoError``, where a write failed.
    """

    def __init__(self, path: Path, nbytes: int, *, over: bool = False) -> None:
        """``nbytes``: that it will have, which are allocated first, since a file system writes
        beyond the end of a file one piece at a time.

        ``over``: the file is there already, and what ``keep`` covers stays as it is.
        """
        self._path, self._need_bytes = path, nbytes
        self._fd = _open(path, nbytes, 0 if over else os.O_CREAT | os.O_EXCL)
        self._before: BinaryIO | None = path.open("rb") if over else None
        self._stages: deque[tuple[Bytes, Future[None] | None]] = deque(
            (np.frombuffer(mmap.mmap(-1, STAGE_BYTES), np.uint8), None) for _ in range(STAGES)
        )
        self._writers = ThreadPoolExecutor(STAGES - 1, "overspill-export-write")
        self._held = self._at = 0  # bytes in the stage, and where they belong
        self._queue: queue.Queue[Bytes | int | None] = queue.Queue(4)
        self._error: BaseException | None = None
        self._crc = self._nbytes = 0
        self._ended = OneShotEvent()
        thread = threading.Thread(target=self._run, name="overspill-export", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._queue.put(None)  # interrupted: the thread may run already
            if thread.ident is None:
                self._close()
            raise

    def write(self, data: Bytes) -> None:
        """Queues the next bytes; they must not change any more."""
        self._raise()
        self._queue.put(data)

    def keep(self, nbytes: int) -> None:
        """The next bytes are as they are in the file."""
        self._queue.put(nbytes)

    def finish(self) -> Written:
        """Waits, flushes to disk and closes.

        Raises:
            IoError: a write failed.
        """
        self._end()
        self._raise()
        return Written(self._nbytes, self._crc)

    def abort(self) -> None:
        """Ends the thread and closes the file, whatever happened."""
        self._error = self._error or InterruptedError("the export was given up")
        self._end()

    def _end(self) -> None:
        """Have the thread end and wait for it.  After an interrupt it can be called again."""
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
                except BaseException as error:  # carried to the thread that writes
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
        """Name the file in an error of the system's, which does not know it."""
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
        """Begins to write so many bytes of the first stage; the next one is free after this."""
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
        if error.errno != errno.EINVAL:  # a file system that knows only the page cache
            raise
        if create:
            path.unlink(missing_ok=True)  # made before direct I/O was refused
        fd = os.open(path, flags, 0o666)
    try:
        if nbytes:
            reserve(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise refused(path, "cannot write", error, need_bytes=nbytes) from error
    return fd
