"""Which bytes of the store files are free, and how extents are laid over several files.  Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from .types import Piece, round_up


class FreeList:
    """The free runs of one file, sorted, never adjacent to each other."""

    def __init__(self, nbytes: int) -> None:
        self._runs: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []
        self.free_bytes = nbytes

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """Runs (offset, nbytes) of ``nbytes`` together: the first run that fits, else the largest.

        Never more than is free may be asked for.
        """
        assert nbytes <= self.free_bytes
        taken: list[tuple[int, int]] = []
        while nbytes > 0:
            index = next((i for i, run in enumerate(self._runs) if run[1] >= nbytes), None)
            if index is None:
                index = max(range(len(self._runs)), key=lambda i: self._runs[i][1])
            offset, length = self._runs[index]
            mine = min(length, nbytes)
            taken.append((offset, mine))
            if mine == length:
                del self._runs[index]
            else:
                self._runs[index] = (offset + mine, length - mine)
            nbytes -= mine
            self.free_bytes -= mine
        return taken

    def claim(self, offset: int, nbytes: int) -> bool:
        """Takes these very bytes; ``False`` if not all of them are free."""
        for index, (start, length) in enumerate(self._runs):
            if start <= offset and offset + nbytes <= start + length:
                end = offset + nbytes
                rest = [(start, offset - start), (end, start + length - end)]
                self._runs[index : index + 1] = [run for run in rest if run[1]]
                self.free_bytes -= nbytes
                return True
        return False

    def give(self, offset: int, nbytes: int) -> None:
        """Takes a run back, and joins it to its neighbours."""
        index = bisect.bisect(self._runs, (offset, nbytes))
        assert index == 0 or sum(self._runs[index - 1]) <= offset, "freed twice"
        assert index == len(self._runs) or offset + nbytes <= self._runs[index][0], "freed twice"
        self.free_bytes += nbytes
        if index < len(self._runs) and self._runs[index][0] == offset + nbytes:
            nbytes += self._runs.pop(index)[1]
        if index > 0 and sum(self._runs[index - 1]) == offset:
            start, length = self._runs[index - 1]
            self._runs[index - 1] = (start, length + nbytes)
        else:
            self._runs.insert(index, (offset, nbytes))

    def largest(self) -> int:
        return max((run[1] for run in self._runs), default=0)


class Space:
    """Lays extents over files in proportion to their rates.

    An extent is cut in blocks, and each file gets its share of them, rounded to whole blocks, so
    that all files end within a block's time of each other.  What rounding gave one file too much
    it gets less the next time, so that small extents balance too.
    """

    def __init__(self, file_bytes: Sequence[int], rates: Sequence[float], block_bytes: int) -> None:
        self._free = [FreeList(nbytes) for nbytes in file_bytes]
        self.rates = tuple(rates)
        self._shares = [rate / sum(rates) for rate in rates]
        self._credit = [0.0] * len(self._free)
        self._block_bytes = block_bytes
        self.total_bytes = sum(file_bytes)

    @property
    def free_bytes(self) -> int:
        return sum(free.free_bytes for free in self._free)

    def take(self, nbytes: int) -> tuple[Piece, ...] | None:
        """Pieces of ``nbytes`` (a multiple of 4096) together; ``None`` if not that much is free."""
        if nbytes > self.free_bytes:
            return None
        pieces = []
        for file, mine in enumerate(self._split(nbytes)):
            for offset, length in self._free[file].take(mine):
                pieces.append(Piece(file, offset, length))
        return tuple(pieces)

    def add(self, file: int, offset: int, nbytes: int) -> None:
        """Add ``nbytes`` after ``offset``, by which the file has become longer."""
        if nbytes:
            self._free[file].give(offset, nbytes)
            self.total_bytes += nbytes

    def claim(self, pieces: Sequence[Piece]) -> bool:
        """Takes these very pieces; ``False`` if they overlap what is taken, or leave the files."""
        return all(
            p.file < len(self._free) and self._free[p.file].claim(p.offset, p.nbytes)
            for p in pieces
        )

    def give(self, pieces: Sequence[Piece]) -> None:
        """Takes pieces back."""
        for piece in pieces:
            self._free[piece.file].give(piece.offset, piece.nbytes)

    def _split(self, nbytes: int) -> list[int]:
        """How many bytes each file gives."""
        if len(self._free) == 1:
            return [nbytes]
        block = self._block_bytes
        wanted = [share * nbytes + c for share, c in zip(self._shares, self._credit, strict=True)]
        given = [0] * len(self._free)
        left = nbytes
        for file, want in enumerate(wanted):
            room = self._free[file].free_bytes // block * block
            given[file] = min(max(int(want) // block * block, 0), room, left // block * block)
            left -= given[file]
        while left > 0:
            mine = min(block, left)
            open_files = [f for f, free in enumerate(self._free) if free.free_bytes > given[f]]
            file = max(open_files, key=lambda f: wanted[f] - given[f])
            mine = min(mine, self._free[file].free_bytes - given[file])
            given[file] += mine
            left -= mine
        bound = float(block)
        self._credit = [
            min(max(want - got, -bound), bound) for want, got in zip(wanted, given, strict=True)
        ]
        return given


def file_shares(nbytes: int, rates: Sequence[float], block_bytes: int) -> list[int]:
    """The size of each store file for ``nbytes`` in all: in proportion, in whole blocks."""
    if nbytes <= 0:
        return [0] * len(rates)
    if len(rates) == 1:
        return [round_up(nbytes)]
    total = sum(rates)
    return [round_up(int(nbytes * rate / total) + block_bytes, block_bytes) for rate in rates]
