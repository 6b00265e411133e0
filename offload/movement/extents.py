"""Assignment of disk extents to items: two for an item that must survive a crash, else one.

Weights that are not trained also have two in a durable store, in case they are edited. Their second
extent lies behind all others, in the sparse part of the files, so it uses no disk space before an
edit. Weights that are read in place have their ranges in files outside the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..facts.tier import Tier
from ..io_engine import Extent
from ..io_engine.file_ranges import FileRanges
from ..schedule.layout import Layout
from ..schedule.messages import Key, Kind
from ..schedule.units import PAGE, align

GROWTH_BYTES = 256 << 20  # the store grows by at least this much


class Allocator(Protocol):
    """An allocator of extents, such as the I/O engine."""

    def allocate(self, nbytes: int) -> Extent: ...

    def free(self, extent: Extent) -> None: ...

    def grow(self, nbytes: int) -> None: ...

    @property
    def free_bytes(self) -> int: ...


class Extents:
    """The mapping from (item, role) to an extent of the store."""

    def __init__(
        self,
        layout: Layout,
        store: Allocator | None,
        kept: Mapping[tuple[Key, int], Extent] | None = None,
        files: Mapping[int, FileRanges] | None = None,
    ) -> None:
        """
        Args:
            kept: the extents of a store that was reopened.
            files: by unit, the ranges of weights that are read in place.
        """
        self._store = store
        self._extents: dict[tuple[Key, int], Extent] = dict(kept or {})
        self._files = dict(files or {})
        if store is None:
            return
        pair = 2 if layout.durable else 1
        for unit, home in zip(layout.units, layout.homes, strict=True):
            mine = unit.weight_bytes and unit.index not in layout.in_place
            if (layout.durable or home.weights is Tier.NVME) and mine:
                first = pair if unit.trainable else 1
                self._add(store, Key(Kind.WEIGHTS, unit.index), first, unit.stored_bytes)
            if home.grads is Tier.NVME:
                item = Key(Kind.GRADS, unit.index)
                self._add(store, item, 1, layout.grad_bytes[unit.index])
            for subgroup, tier in zip(layout.subgroups[unit.index], home.state, strict=True):
                if layout.durable or tier is Tier.NVME:
                    item = Key(Kind.STATE, subgroup.index)
                    self._add(store, item, pair, subgroup.nbytes)
        for unit in layout.clean if layout.durable else ():
            self._add(store, Key(Kind.WEIGHTS, unit.index), pair, unit.stored_bytes)

    def _add(self, store: Allocator, item: Key, copies: int, nbytes: int) -> None:
        for role in range(copies):
            if (item, role) not in self._extents:
                self._extents[item, role] = store.allocate(nbytes)

    def of(self, item: Key, role: int) -> Extent:
        """Return the extent of ``item`` in ``role``."""
        return self._extents[item, role]

    def source(self, item: Key, role: int) -> Extent | FileRanges:
        """Return what ``item`` in ``role`` is read from: its extent, or ranges of files."""
        if item.kind is Kind.WEIGHTS and item.number in self._files:
            return self._files[item.number]
        return self._extents[item, role]

    def take(self, item: Key, nbytes: int) -> None:
        """Allocate an extent for ``item`` unless it has one, growing the store if needed.

        Used for items that come and go while the engine runs.
        """
        if (item, 0) in self._extents:
            return
        assert self._store is not None
        missing = align(nbytes, PAGE) - self._store.free_bytes
        if missing > 0:
            self._store.grow(max(missing, GROWTH_BYTES))
        self._add(self._store, item, 1, nbytes)

    def give_back(self, item: Key) -> None:
        """Free the extent of ``item``, if it has one."""
        extent = self._extents.pop((item, 0), None)
        if extent is not None and self._store is not None:
            self._store.free(extent)
