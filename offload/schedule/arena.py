"""Allocation of offsets in a fixed span of memory: first fit, joining free neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from ..facts.tier import Tier


class Place(NamedTuple):
    """A slot: ``nbytes`` at ``offset`` in the memory arena of ``tier``."""

    tier: Tier
    offset: int
    nbytes: int

    def overlaps(self, other: Place) -> bool:
        return (
            self.tier is other.tier
            and self.offset < other.offset + other.nbytes
            and other.offset < self.offset + self.nbytes
        )


class Arena:
    """An allocator of places in ``[base, base + nbytes)`` of a tier.  It computes offsets only."""

    counts_only = False

    def __init__(self, tier: Tier, base: int, nbytes: int) -> None:
        self.tier, self.base, self.nbytes = tier, base, nbytes
        self.used_bytes = 0
        self._free: list[tuple[int, int]] = [(base, nbytes)] if nbytes else []

    def allocate(self, nbytes: int) -> Place | None:
        """Allocate a place of ``nbytes``; return ``None`` if no hole is long enough."""
        if nbytes == 0:
            return Place(self.tier, self.base, 0)
        for i, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                if length == nbytes:
                    del self._free[i]
                else:
                    self._free[i] = (offset + nbytes, length - nbytes)
                self.used_bytes += nbytes
                return Place(self.tier, offset, nbytes)
        return None

    def hole(self, nbytes: int) -> Place | None:
        """Return the place that ``allocate`` would return, without allocating it."""
        for offset, length in self._free:
            if length >= nbytes:
                return Place(self.tier, offset, nbytes)
        return Place(self.tier, self.base, 0) if nbytes == 0 else None

    def free(self, place: Place) -> None:
        """Free a place."""
        if place.nbytes == 0:
            return
        offset, nbytes = place.offset, place.nbytes
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + nbytes:
            nbytes += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            before, length = self._free.pop(at - 1)
            offset, nbytes = before, nbytes + length
        insort(self._free, (offset, nbytes))
        self.used_bytes -= place.nbytes

    def fits_after(self, nbytes: int, freed: list[Place]) -> bool:
        """Return whether ``nbytes`` would fit after freeing ``freed``."""
        if nbytes == 0 or any(length >= nbytes for _, length in self._free):
            return True
        if not freed:
            return False
        spans = sorted([*self._free, *((p.offset, p.nbytes) for p in freed)])
        end = run = -1
        for offset, length in spans:
            run = run + length if offset == end else length
            end = offset + length
            if run >= nbytes:
                return True
        return False


class Tally(Arena):
    """A counter of bytes that are allocated elsewhere.

    Its places are only identifiers; each is used once.
    """

    counts_only = True

    def __init__(self, tier: Tier, base: int, nbytes: int) -> None:
        super().__init__(tier, base, nbytes)
        self._end = base

    def take(self, nbytes: int) -> Place:
        """Count ``nbytes``, even if they exceed the room; return their place."""
        place = Place(self.tier, self._end, nbytes)
        self._end += nbytes
        self.used_bytes += nbytes
        return place

    def allocate(self, nbytes: int) -> Place | None:
        return self.take(nbytes) if self.used_bytes + nbytes <= self.nbytes else None

    def free(self, place: Place) -> None:
        self.used_bytes -= place.nbytes
