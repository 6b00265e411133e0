"""Rewriting of manifests without damaged or unwanted records."""

from __future__ import annotations

import struct

from .manifest import Found, Generation, RecordKind, write_anew


def repair(found: Found) -> tuple[Generation, ...]:
    """Drops what is damaged from a manifest and keeps every whole commit, which it returns.

    The caller holds the directory's lock, and has read the manifest since.
    """
    _keep(found, len(found.generations))
    return found.generations


def go_back(found: Found, generation: Generation) -> None:
    """Drops commits after ``generation`` from a manifest: they were never agreed on.

    The caller holds the directory's lock, has read the manifest since, and knows that the data of
    ``generation`` are whole.
    """
    numbers = [each.number for each in found.generations]
    _keep(found, numbers.index(generation.number) + 1)


def _keep(found: Found, commits: int) -> None:
    """Writes a manifest with so many of its commits."""
    records: list[tuple[int, bytes]] = []
    for record in found.log.records:
        if record.kind == RecordKind.COMMIT:
            commits -= 1
        if record.kind != RecordKind.SEAL and (record.kind != RecordKind.COMMIT or commits >= 0):
            records.append((record.kind, record.payload))
    if last := sum(kind == RecordKind.COMMIT for kind, _ in records):
        seal = struct.pack("<Q", found.generations[last - 1].number)
        records.append((RecordKind.SEAL, seal))
    write_anew(found.path, [(kind, n, data) for n, (kind, data) in enumerate(records, 1)])
