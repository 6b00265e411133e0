"""A log of records that distinguishes a torn end from damage.  Pure: bytes in, bytes out.

Every record begins on its own sector with a frame: magic, kind, CRC-32 of all the rest, a number
that grows by one, and its length; zeroes fill its last sector.  An incomplete end of the log was
being written when the process or the machine died, and is ignored.  An incomplete part with a whole
record after it is a hole.  Whether a hole is damage depends on what was flushed in between, which
only the caller knows.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

SECTOR = 4096
MAGIC = b"OVSPILL\x00"
_FRAME = struct.Struct("<8sIIQQ")  # magic, kind, CRC, number, payload bytes
_TAIL = struct.Struct("<IQQ")  # what the CRC covers ahead of the payload: kind, number, bytes


@dataclass(frozen=True)
class Record:
    """A whole record, and where it lies in the log."""

    kind: int
    number: int
    payload: bytes
    offset: int
    end: int


@dataclass(frozen=True)
class Hole:
    """Sectors that hold no whole record, between whole ones (``before``: ``None`` at the start).

    ``blank``: nothing but zeroes, as where nothing was ever written.
    """

    offset: int
    nbytes: int
    blank: bool
    before: Record | None
    after: Record


@dataclass(frozen=True)
class Log:
    """What a scan found: whole records in order, where the next belongs, and what is missing.

    ``torn`` says that an unfinished record ends the log; ``blank``, that it is nothing but zeroes.
    """

    records: tuple[Record, ...]
    end: int
    torn: bool
    blank: bool
    holes: tuple[Hole, ...]


def encode(kind: int, number: int, payload: bytes) -> bytes:
    """A record in whole sectors."""
    crc = zlib.crc32(payload, zlib.crc32(_TAIL.pack(kind, number, len(payload))))
    record = _FRAME.pack(MAGIC, kind, crc, number, len(payload)) + payload
    return record + bytes(-len(record) % SECTOR)


def _decode(data: bytes, offset: int) -> Record | None:
    if data[offset : offset + len(MAGIC)] != MAGIC or offset + _FRAME.size > len(data):
        return None
    _, kind, crc, number, nbytes = _FRAME.unpack_from(data, offset)
    start = offset + _FRAME.size
    end = start + nbytes + -(_FRAME.size + nbytes) % SECTOR
    if end > len(data):
        return None
    payload = data[start : start + nbytes]
    if crc != zlib.crc32(payload, zlib.crc32(_TAIL.pack(kind, number, nbytes))):
        return None
    if any(data[start + nbytes : end]):
        return None
    return Record(kind, number, payload, offset, end)


def scan(data: bytes) -> Log:
    """Reads a whole log."""
    records: list[Record] = []
    holes: list[Hole] = []
    offset = end = 0
    lost_at: int | None = None
    while offset < len(data):
        record = _decode(data, offset)
        if record is None or (records and record.number <= records[-1].number):
            lost_at = offset if lost_at is None else lost_at
            offset += SECTOR
            continue
        if lost_at is not None:
            before, nbytes = records[-1] if records else None, offset - lost_at
            blank = not any(data[lost_at:offset])
            holes.append(Hole(lost_at, nbytes, blank, before, record))
            lost_at = None
        records.append(record)
        offset = end = record.end
    blank = not any(data[end:])
    return Log(tuple(records), end, lost_at is not None, blank, tuple(holes))
