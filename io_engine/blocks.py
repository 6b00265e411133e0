"""Checked blocks of store files, read by a few threads past the page cache."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import IoError, refused
from .types import SECTOR_BYTES, round_up

THREADS = 4  # reads under way
KEPT_BLOCKS = 16  # blocks that two tensors, or two fields of a record, share

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Block:
    """What one checksum covers: ``start`` is its place in the item, ``offset`` in the file."""

    item: int
    file: int
    offset: int
    start: int
    nbytes: int
    checksum: int | None


class BlockFiles:
    """Reads blocks.  ``check`` is called with each that was read, and raises what is wrong."""

    def __init__(self, paths: Sequence[Path], check: Callable[[Block, Path, Bytes], None]) -> None:
        self._paths, self._check = paths, check
        self._lock = threading.Lock()
        self._kept: OrderedDict[Block, tuple[Future[Bytes], int]] = OrderedDict()
        self._fds: list[int] = []
        try:
            for path in paths:
                self._fds.append(_open(path))
        except OSError as error:
            self.close()
            raise refused(path, "cannot open", error) from error
        self._threads = ThreadPoolExecutor(THREADS, "overspill-blocks")

    def close(self) -> None:
        """Ends the threads and closes the files."""
        if hasattr(self, "_threads"):
            self._threads.shutdown(cancel_futures=True)
        while self._fds:
            os.close(self._fds.pop())
        self._kept.clear()

    def begin(self, block: Block, nbytes: int) -> Future[Bytes]:
        """Begins to read a block of which ``nbytes`` are wanted; what else it holds may be asked
        for later, so it is kept until all of it was, or others are.

        The result raises:
            IoError: the file cannot be read.
            CorruptionError: ``check`` says so.
        """
        with self._lock:
            if block in self._kept:
                future, left = self._kept.pop(block)
            else:
                future, left = self._threads.submit(self._fetch, block), block.nbytes
            if left > nbytes:
                self._kept[block] = future, left - nbytes
                if len(self._kept) > KEPT_BLOCKS:
                    self._kept.popitem(last=False)
            return future

    def _fetch(self, block: Block) -> Bytes:
        path, fd, done = self._paths[block.file], self._fds[block.file], 0
        data = _aligned(round_up(block.nbytes))
        while done < block.nbytes:
            try:
                got = os.preadv(fd, [data[done:].data], block.offset + done)
            except OSError as error:
                raise refused(path, "cannot read", error) from error
            if got == 0:
                raise IoError(f"{path}: the file ends at {block.offset + done}; it was cut short",
                              path=str(path))  # fmt: skip
            done += got
        self._check(block, path, data[: block.nbytes])
        return data[: block.nbytes]


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that knows only the page cache
            raise
        return os.open(path, flags)


def _aligned(nbytes: int) -> Bytes:
    """Memory that direct reads take."""
    whole = np.empty(nbytes + SECTOR_BYTES, np.uint8)
    skip = -whole.__array_interface__["data"][0] % SECTOR_BYTES
    return whole[skip : skip + nbytes]
