"""Tensors that are written in parts, so that none is ever whole in memory."""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

PART_BYTES = 8 << 20
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class StreamedTensor:
    """A dense tensor: ``parts`` gives its bytes in order, a few MiB at a time."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Bytes]]

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

    def parts() -> Iterator[Bytes]:
        made = value()
        if made.dtype != dtype or tuple(made.shape) != size:
            raise ValueError(f"{name}: expected {dtype} {size}, got {made.dtype} {made.shape}")
        data = bytes_of(made)
        for start in range(0, data.size, PART_BYTES):
            yield data[start : start + PART_BYTES]

    return StreamedTensor(name, dtype, size, parts)


def in_memory(name: str, value: torch.Tensor) -> StreamedTensor:
    """A tensor that is there already."""
    return lazy(name, value.dtype, value.shape, lambda: value)


@dataclass(frozen=True)
class Written:
    """A finished file: its length, and the CRC-32 of all of it."""

    nbytes: int
    crc32: int


class FileWriter:
    """Writes a file from its start to its end on a thread of its own, and sums it up.

    At most four parts wait, so memory is bounded; ``finish`` raises what went wrong.
    """

    def __init__(self, path: Path, *, over: bool = False) -> None:
        """``over``: the file is there already, and what ``keep`` covers stays as it is."""
        self._file: BinaryIO = path.open("r+b" if over else "wb")
        self._queue: queue.Queue[Bytes | int | None] = queue.Queue(4)
        self._error: BaseException | None = None
        self._crc = self._nbytes = 0
        self._thread = threading.Thread(target=self._run, name="overspill-export", daemon=True)
        self._thread.start()

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
            OSError: a write failed.
        """
        self._end()
        self._raise()
        return Written(self._nbytes, self._crc)

    def abort(self) -> None:
        """Ends the thread and closes the file, whatever happened."""
        self._error = self._error or InterruptedError("the export was given up")
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._take(data)
                except BaseException as error:  # carried to the thread that writes
                    self._error = error
        if self._error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self._error = error

    def _take(self, data: Bytes | int) -> None:
        if isinstance(data, int):
            data = np.frombuffer(self._file.read(data), np.uint8)
        else:
            self._file.write(data.data)
        self._crc = zlib.crc32(data.data, self._crc)
        self._nbytes += data.size
