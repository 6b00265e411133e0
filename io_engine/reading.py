"""Reads what a commit holds, any bytes of it, without opening the store for transfers.

For tools: nothing is locked, so a store in use can be looked at; what its owner has overwritten
since is told by the checksums.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .committed import FoundStore
from .errors import CorruptionError, IoError, remedy_for
from .manifest import Generation, Item
from .native import crc32
from .store import STORE_NAME
from .transfer import runs_of

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


class StoreReader:
    """The items of one generation.  Holds ``cached_blocks`` blocks at most; close it."""

    def __init__(self, store: FoundStore, generation: Generation, cached_blocks: int = 6) -> None:
        self.layout, self.generation = store.layout, generation
        self._numbers = {item.key: number for number, item in enumerate(store.layout.items)}
        self._blocks: dict[int, tuple[list[Block], list[int]]] = {}
        self._cache: OrderedDict[Block, Bytes] = OrderedDict()
        self._limit = cached_blocks
        self._paths = [directory / STORE_NAME for directory in store.directories]
        self._fds: list[int] = []
        try:
            for path in self._paths:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise _fail(path, "cannot open", error) from error

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._fds:
            os.close(self._fds.pop())
        self._cache.clear()

    def read(self, key: str, start: int, stop: int) -> Bytes:
        """A copy of bytes ``[start, stop)`` of an item; zeroes if it was never written.

        Raises:
            CorruptionError: a checksum does not match.
            IoError: the file cannot be read.
            KeyError: there is no such item.
        """
        out = np.zeros(stop - start, np.uint8)
        blocks, starts = self._plan(self._numbers[key])
        first = max(bisect_right(starts, start) - 1, 0)
        for block in blocks[first:]:
            if block.start >= stop:
                break
            low, high = max(start, block.start), min(stop, block.start + block.nbytes)
            if low < high:
                data = self._load(block)
                out[low - start : high - start] = data[low - block.start : high - block.start]
        return out

    def verify(self) -> Iterator[tuple[int, str | None]]:
        """Reads everything once; per block its bytes, and what is wrong with it, if anything."""
        for number in range(len(self.layout.items)):
            for block in self._plan(number)[0]:
                try:
                    self._fetch(block)
                except (CorruptionError, IoError) as error:
                    yield block.nbytes, str(error)
                else:
                    yield block.nbytes, None

    def nbytes(self) -> int:
        """Bytes that the generation keeps on disk."""
        return sum(b.nbytes for n in range(len(self.layout.items)) for b in self._plan(n)[0])

    def _plan(self, number: int) -> tuple[list[Block], list[int]]:
        if number not in self._blocks:
            blocks = list(self._cut(number, self.layout.items[number]))
            self._blocks[number] = blocks, [block.start for block in blocks]
        return self._blocks[number]

    def _cut(self, number: int, item: Item) -> Iterator[Block]:
        role = self.generation.roles[number]
        if role < 0:
            return
        sums = self.generation.checksums[number]
        start = count = 0
        for file, offset, nbytes in runs_of(item.extents[role]):
            for at in range(0, nbytes, self.layout.block_bytes):
                length = min(self.layout.block_bytes, nbytes - at)
                checksum = None if sums is None else int(sums[count])
                yield Block(number, file, offset + at, start, length, checksum)
                start, count = start + length, count + 1

    def _load(self, block: Block) -> Bytes:
        data = self._cache.get(block)
        if data is None:
            while len(self._cache) >= self._limit:
                self._cache.popitem(last=False)
            data = self._cache[block] = self._fetch(block)
        self._cache.move_to_end(block)
        return data

    def _fetch(self, block: Block) -> Bytes:
        data, done, fd = np.empty(block.nbytes, np.uint8), 0, self._fds[block.file]
        path = self._paths[block.file]
        while done < block.nbytes:
            try:
                got = os.preadv(fd, [data.data[done:]], block.offset + done)
            except OSError as error:
                raise _fail(path, "cannot read", error) from error
            if got == 0:
                raise IoError(f"{path}: the file ends at {block.offset + done}; it was cut short",
                              path=str(path))  # fmt: skip
            done += got
        os.posix_fadvise(fd, block.offset, block.nbytes, os.POSIX_FADV_DONTNEED)
        if block.checksum is not None and crc32(data) != block.checksum:
            raise CorruptionError(
                f"{path}: {block.nbytes} bytes at offset {block.offset}, of "
                f"{self.layout.items[block.item].key!r}, do not match the checksum of generation "
                f"{self.generation.number}: the disk has changed them, or a later step has; "
                "restore the store from a copy, or start from an export",
                path=str(path),
            )
        return data


def _fail(path: Path, what: str, error: OSError) -> IoError:
    code = error.errno or 0
    return IoError(
        f"{path}: {what}: {os.strerror(code)}; {remedy_for(code)}", path=str(path), errno=code
    )
