"""Copying a store's last commit to other directories, with other stripes and record sizes.

The old store stays unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import StoreError
from ..io_engine import Extent, IoEngine, Lease, Ticket
from ..io_engine.committed import OwnedStore, own_store
from ..io_engine.manifest import Generation, Sums
from ..io_engine.reading import StoreReader
from ..observe.long_work import LongWork
from ..schedule.describe import describe_units
from ..schedule.layout import Layout

log = logging.getLogger("overspill")

Bytes = NDArray[np.uint8]
Node = Mapping[str, Any]  # part of a store's description
Field = Mapping[str, Any]


def move_store(
    store: OwnedStore, generation: Generation, directories: Sequence[Path], layout: Layout,
    disk_bytes: int,
) -> OwnedStore:  # fmt: skip
    """Copy ``generation`` to a new store in ``directories``, with one commit.

    Its state is cut into records as in ``layout``.  Only a few records are in memory at a time.

    Raises:
        IoError: a directory has a store or too little space; nothing is left there.
        CorruptionError: copied data does not match its checksum.
    """
    units = describe_units(layout)
    description = {**store.layout.description, "units": units}
    clean = {f"weights/{number}" for number, unit in enumerate(units) if not unit["trainable"]}
    io = IoEngine(
        list(directories), disk_bytes + layout.spare_bytes, checksum=store.layout.checksum,
        sparse_bytes=layout.spare_bytes,
    )  # fmt: skip
    work = LongWork("copying the store", disk_bytes // 2)
    with io, StoreReader(store, generation) as reader, work as done:
        named: list[tuple[str, list[Extent]]] = []
        roles: list[int] = []
        sums: list[Sums | None] = []
        last: Ticket | None = None
        for key, nbytes, data in _items(reader, store.layout.description, units):
            pair = [io.allocate(nbytes)]
            named.append((key, pair))
            roles.append(-1 if data is None else 0)
            done(nbytes)
            if data is not None:
                lease = io.buffer(nbytes)
                lease.array[:nbytes] = data
                if last is not None:
                    last.wait()
                last = io.write(pair[0], lease.array[:nbytes], on_done=partial(_release, lease))
        if last is not None:
            last.wait()
        io.wait_all()
        for _, pair in sorted(named, key=lambda each: each[0] in clean):  # sparse ones last
            pair.append(io.allocate(pair[0].nbytes))
        sums = [
            io.checksums(pair[0]) if role == 0 else None
            for (_, pair), role in zip(named, roles, strict=True)
        ]
        manifest = io.make_durable(named, description)
        try:
            manifest.commit(generation.step, roles, sums, generation.meta, kept=generation.kept)
        except BaseException:
            io.make_ephemeral(manifest)
            raise
        finally:
            manifest.close()
    log.info(
        "overspill: the store of %s was copied to %s; the old one is no longer needed",
        ", ".join(map(str, store.directories)), ", ".join(map(str, directories)),
    )  # fmt: skip
    made = own_store(list(directories))
    if made.layout.store != manifest.layout.store:
        made.locks.release()
        raise StoreError(f"{directories[0]}: another process has taken the copy; try again")
    return made


def _release(lease: Lease, ticket: Ticket) -> None:
    lease.release()


def _items(
    reader: StoreReader, description: Node, here: Sequence[Node]
) -> Iterator[tuple[str, int, Bytes | None]]:
    """Yield each item of the new store in commit order: key, bytes, and contents.

    The contents are ``None`` if the item was never written.
    """
    there = description["units"]
    in_place = description.get("sources", {}).get("units", {})
    for number, unit in enumerate(here):
        if unit["weight_bytes"] and str(number) not in in_place:
            key, nbytes = f"weights/{number}", unit["weight_bytes"]
            yield key, nbytes, reader.read(key, 0, nbytes) if reader.written(key) else None
    for old, new in zip(there, here, strict=True):
        for record in new["subgroups"]:
            sources = [s for s in old["subgroups"] if _overlap(s, record) is not None]
            written = any(reader.written(f"state/{s['index']}") for s in sources)
            data = _record(reader, sources, record) if written else None
            yield f"state/{record['index']}", record["nbytes"], data


def _overlap(source: Node, record: Node) -> tuple[int, int] | None:
    """Return the range of elements that two records of a unit have in common."""
    low = max(source["start"], record["start"])
    high = min(source["start"] + source["count"], record["start"] + record["count"])
    return (low, high) if source["chunk"] == record["chunk"] and low < high else None


def _record(reader: StoreReader, sources: Sequence[Node], record: Node) -> Bytes:
    """Assemble a record from the old records that have its elements."""
    data = np.zeros(record["nbytes"], np.uint8)
    for source in sources:
        span = _overlap(source, record)
        assert span is not None
        fields = {f["name"]: f for f in source["fields"]}
        for f in record["fields"]:
            to, stop = _bytes_of(f, record, span)
            low, high = _bytes_of(fields[f["name"]], source, span)
            if high - low > stop - to:
                raise StoreError(
                    f"the state of a parameter takes {high - low} bytes in the store, and "
                    f"{stop - to} with this optimizer; pass one with the options of the run before"
                )
            data[to : to + high - low] = reader.read(f"state/{source['index']}", low, high)
    return data


def _bytes_of(field: Field, record: Node, span: tuple[int, int]) -> tuple[int, int]:
    """Return where a record stores a field's values for these elements of the chunk.

    Records are cut at block boundaries, so two records never share a value.
    """
    if not field["block"]:  # of a parameter as a whole
        nbytes = field["numel"] * getattr(torch, field["dtype"]).itemsize
        return field["offset"], field["offset"] + nbytes
    size = getattr(torch, field["dtype"]).itemsize
    low, high = (element - record["start"] for element in span)
    assert low % field["block"] == 0, "a record begins within a block"
    return field["offset"] + low // field["block"] * size, (
        field["offset"] + -(-high // field["block"]) * size
    )


__all__ = ["move_store"]
