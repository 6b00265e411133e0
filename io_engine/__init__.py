"""Moves bytes between host memory and files on NVMe: fast, checked, and honest about failures.

Usable alone::

    with IoEngine(["/scratch/run1"], capacity_bytes=1 << 30) as engine:
        extent = engine.allocate(16 << 20)
        with engine.buffer(extent.nbytes) as buffer:
            buffer.array[:] = 7
            engine.write(extent, buffer).wait()
            engine.read(extent, buffer).wait()

What makes a store durable, and reads one, stands in ``manifest``, ``committed`` and ``reading``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazily

if TYPE_CHECKING:
    from .buffers import Lease, allocate_host
    from .engine import IoEngine
    from .errors import CorruptionError, IoError, OffloadError
    from .types import Extent, IoStats, Ticket

__all__ = [
    "CorruptionError",
    "Extent",
    "IoEngine",
    "IoError",
    "IoStats",
    "Lease",
    "OffloadError",
    "Ticket",
    "allocate_host",
]

# Imported when they are first asked for: who wants an error alone does not wait for an engine.
_FROM = {
    "buffers": ("Lease", "allocate_host"),
    "engine": ("IoEngine",),
    "errors": ("CorruptionError", "IoError", "OffloadError"),
    "types": ("Extent", "IoStats", "Ticket"),
}

__getattr__, __dir__ = lazily(globals(), _FROM)
