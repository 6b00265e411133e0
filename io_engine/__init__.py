"""Moves bytes between host memory and files on NVMe: fast, checked, and honest about failures.

Usable alone::

    with IoEngine(["/scratch/run1"], capacity_bytes=1 << 30) as engine:
        extent = engine.allocate(16 << 20)
        with engine.buffer(extent.nbytes) as buffer:
            buffer.array[:] = 7
            engine.write(extent, buffer).wait()
            engine.read(extent, buffer).wait()
"""

from __future__ import annotations

from .buffers import Lease, allocate_host
from .committed import FoundStore, OwnedStore, find_store, own_store
from .engine import IoEngine
from .errors import CorruptionError, IoError, OffloadError
from .manifest import Generation, Item, Manifest, StoreLayout
from .once import Once
from .reading import StoreReader
from .types import Extent, IoStats, Ticket

__all__ = [
    "CorruptionError",
    "Extent",
    "FoundStore",
    "Generation",
    "IoEngine",
    "IoError",
    "IoStats",
    "Item",
    "Lease",
    "Manifest",
    "OffloadError",
    "Once",
    "OwnedStore",
    "StoreLayout",
    "StoreReader",
    "Ticket",
    "allocate_host",
    "find_store",
    "own_store",
]
