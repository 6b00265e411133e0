"""Reads any bytes of a commit, without opening the store for transfers.

For tools: nothing is locked, so a store in use can be inspected; checksums detect data that its
owner has overwritten since.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .blocks import THREADS, Block, BlockFiles
from .committed import FoundStore
from .errors import CorruptionError, IoError
from .manifest import Generation, StoredItem
from .native import crc32
from .store_file import STORE_NAME
from .transfer import runs_of

Bytes = NDArray[np.uint8]


class StoreReader:
    """The items of one generation.  Holds what is begun, and some blocks; close it."""

    def __init__(self, store: FoundStore, generation: Generation) -> None:
        self.layout, self.generation = store.layout, generation
        self._numbers = {item.key: number for number, item in enumerate(store.layout.items)}
        self._blocks: dict[int, tuple[list[Block], list[int]]] = {}
        self._files = BlockFiles([d / STORE_NAME for d in store.directories], self._check)

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def read(self, key: str, start: int, stop: int) -> Bytes:
        """A copy of bytes ``[start, stop)`` of an item; zeroes if it was never written.

        Raises:
            CorruptionError: a checksum does not match.
            IoError: the file cannot be read.
            KeyError: there is no such item.
        """
        return self.begin(key, start, stop)()

    def begin(self, key: str, start: int, stop: int) -> Callable[[], Bytes]:
        """Begins what ``read`` does; the function returned waits and gives the bytes, once.

        Bytes of an item that are asked for in order are read from the disk once, unless too many
        others are asked for in between.
        """
        blocks, starts = self._plan(self._numbers[key])
        first, end = max(bisect_right(starts, start) - 1, 0), bisect_left(starts, stop)
        begun: deque[tuple[int, int, int, Future[Bytes]]] = deque()
        for block in blocks[first:end]:
            low, high = max(start, block.start), min(stop, block.start + block.nbytes)
            begun.append((block.start, low, high, self._files.begin(block, high - low)))

        def wait() -> Bytes:
            out = (np.empty if blocks else np.zeros)(stop - start, np.uint8)
            while begun:
                at, low, high, future = begun.popleft()
                out[low - start : high - start] = future.result()[low - at : high - at]
            return out

        return wait

    def written(self, key: str) -> bool:
        """Whether an item was ever written; else it reads as zeroes."""
        return self.generation.roles[self._numbers[key]] >= 0

    def verify(self) -> Iterator[tuple[int, str | None]]:
        """Reads everything once; per block its bytes, and what is wrong with it, if anything."""
        blocks = (block for item in range(len(self.layout.items)) for block in self._plan(item)[0])
        begun: deque[tuple[int, Future[Bytes]]] = deque()
        while True:
            for block in islice(blocks, THREADS - len(begun)):
                begun.append((block.nbytes, self._files.begin(block, block.nbytes)))
            if not begun:
                return
            nbytes, future = begun.popleft()
            try:
                future.result()
            except (CorruptionError, IoError) as error:
                yield nbytes, str(error)
            else:
                yield nbytes, None

    def nbytes(self) -> int:
        """Bytes that the generation keeps on disk."""
        return sum(b.nbytes for n in range(len(self.layout.items)) for b in self._plan(n)[0])

    def _plan(self, number: int) -> tuple[list[Block], list[int]]:
        if number not in self._blocks:
            blocks = list(self._cut(number, self.layout.items[number]))
            self._blocks[number] = blocks, [block.start for block in blocks]
        return self._blocks[number]

    def _cut(self, number: int, item: StoredItem) -> Iterator[Block]:
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

    def _check(self, block: Block, path: Path, data: Bytes) -> None:
        if block.checksum is not None and crc32(data) != block.checksum:
            raise CorruptionError(
                f"{path}: {block.nbytes} bytes at offset {block.offset}, of "
                f"{self.layout.items[block.item].key!r}, do not match the checksum of generation "
                f"{self.generation.number}: the disk has changed them, or a later step has; "
                "restore the store from a copy, or start from an export",
                path=str(path),
            )
