"""Conversion of an extent and a buffer to the segments that a backend moves.

Pure, except that it uses addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .backend import Segment
from .buffers import Lease, TransferMemory
from .types import SECTOR_BYTES, Direction, Extent

Buffer = Lease | NDArray[np.uint8] | memoryview

Tail = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def runs_of(extent: Extent) -> list[tuple[int, int, int]]:
    """(file, offset, nbytes) of an extent; what is short of a sector at its end stands alone.

    The cut is the same whether a buffer holds that sector whole or not, and so are the blocks and
    their checksums.
    """
    runs = [(piece.file, piece.offset, piece.nbytes) for piece in extent.pieces]
    if extent.nbytes % SECTOR_BYTES:
        file, offset, nbytes = runs.pop()
        if nbytes > SECTOR_BYTES:
            runs.append((file, offset, nbytes - SECTOR_BYTES))
        runs.append((file, offset + nbytes - SECTOR_BYTES, SECTOR_BYTES))
    return runs


def block_count(extent: Extent, block_bytes: int) -> int:
    """How many blocks, and so checksums, an extent has."""
    return sum(-(-nbytes // block_bytes) for _, _, nbytes in runs_of(extent))


def cut(nbytes: int, block_bytes: int) -> list[int]:
    """The lengths of a run's blocks."""
    return [min(block_bytes, nbytes - at) for at in range(0, nbytes, block_bytes)]


def plan_transfer(
    kind: Direction,
    extent: Extent,
    buffer: Buffer,
    checksums: NDArray[np.uint32] | None,
    block_bytes: int,
    changing: bool = False,
) -> tuple[Sequence[Segment], TransferMemory, Tail | None]:
    """The segments to move; what must be kept alive meanwhile; and a tail that is moved apart.

    Raises:
        ValueError: the buffer has the wrong type, length or alignment, or cannot be written to.
    """
    array = _as_array(kind, buffer)
    address: int = array.__array_interface__["data"][0]
    if array.nbytes not in (extent.nbytes, extent.padded_bytes):
        raise ValueError(
            f"{extent}: the buffer has {array.nbytes} bytes; it needs {extent.nbytes}, or "
            f"{extent.padded_bytes} with padding; pass a slice of that length"
        )
    if address % SECTOR_BYTES:
        raise ValueError(
            f"{extent}: the buffer begins at {address:#x}, {address % SECTOR_BYTES} bytes behind a "
            f"multiple of {SECTOR_BYTES}; take it from engine.buffer() or allocate_host()"
        )
    tail: Tail | None = None
    tail_bytes = array.nbytes % SECTOR_BYTES
    if tail_bytes:
        tail = _own_sector(), array[array.nbytes - tail_bytes :]
        if kind == "write":
            tail[0][:tail_bytes] = tail[1]
    sums = 0 if checksums is None else int(checksums.__array_interface__["data"][0])
    segments, done = [], 0
    for file, offset, nbytes in runs_of(extent):
        at = address + done
        if tail is not None and done + nbytes > array.nbytes:
            at = tail[0].__array_interface__["data"][0]
        segments.append(Segment(file, offset, at, nbytes, sums, changing))
        done += nbytes
        if sums:
            sums += 4 * -(-nbytes // block_bytes)
    return segments, TransferMemory(array, checksums), tail


def _own_sector() -> NDArray[np.uint8]:
    room = np.zeros(2 * SECTOR_BYTES, np.uint8)
    start = -room.__array_interface__["data"][0] % SECTOR_BYTES
    return room[start : start + SECTOR_BYTES]


def _as_array(kind: Direction, buffer: Buffer) -> NDArray[np.uint8]:
    if isinstance(buffer, Lease):
        return buffer.array
    if isinstance(buffer, memoryview):
        if not buffer.c_contiguous or (kind == "read" and buffer.readonly):
            raise ValueError("a memoryview to read into must be contiguous and writable")
        return np.frombuffer(buffer, np.uint8)
    if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8 or buffer.ndim != 1:
        got = f"{buffer.dtype} {buffer.shape}" if isinstance(buffer, np.ndarray) else type(buffer)
        raise ValueError(f"a buffer is a lease, a flat uint8 array or a memoryview, not {got}")
    if not buffer.flags.c_contiguous or (kind == "read" and not buffer.flags.writeable):
        raise ValueError("an array to transfer must be contiguous, and writable to read into it")
    return buffer
