"""Check the order of accesses to device memory with vector clocks, without any device.

Every stream counts its operations. The clock of an operation gives, for every stream, the count up
to which that stream's operations come before it. These are earlier operations of its own stream,
those of the events it waits for, and so on transitively. Two accesses to the same bytes, one of
them a write, must be ordered by such a chain. Otherwise they may run at the same time whenever the
timing allows it.

Example: ``copy_in`` writes a slot at its count 5, and compute reads it. Compute's clock must hold
``copy_in >= 5``. It does after ``wait`` for the event of that copy, or of a later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .base import OverlapError

__all__ = ["Clock", "Ordering", "join"]

Clock = Mapping[str, int]


def join(*clocks: Clock) -> dict[str, int]:
    """Return the earliest clock that is not before any of ``clocks``."""
    joined: dict[str, int] = {}
    for clock in clocks:
        for stream, count in clock.items():
            if count > joined.get(stream, 0):
                joined[stream] = count
    return joined


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    stream: str
    count: int
    writes: bool

    def overlaps(self, other: _Access) -> bool:
        return self.start < other.stop and other.start < self.stop

    def outside(self, other: _Access) -> list[_Access]:
        """Return the parts of this access that ``other`` does not cover."""
        if not self.overlaps(other):
            return [self]
        parts = []
        if self.start < other.start:
            parts.append(replace(self, stop=other.start))
        if other.stop < self.stop:
            parts.append(replace(self, start=other.stop))
        return parts

    def __str__(self) -> str:
        verb = "write" if self.writes else "read"
        return f"{verb} of bytes [{self.start}, {self.stop}) by {self.stream!r} (its {self.count}.)"


class Ordering:
    """The clocks of all streams and the last accesses to every byte. The caller locks."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._accesses: list[_Access] = []

    def clock(self, stream: str) -> Clock:
        """Return the operations that precede the next one of ``stream``, including its own."""
        return self._clocks.get(stream, {})

    def everything(self) -> Clock:
        """Return a clock that is after all operations of all streams."""
        return join(*self._clocks.values())

    def follow(self, stream: str, clocks: Iterable[Clock]) -> Clock:
        """Order the next operations of ``stream`` after ``clocks``, and return its new clock."""
        self._clocks[stream] = joined = join(self.clock(stream), *clocks)
        return joined

    def access(
        self, stream: str, start: int, nbytes: int, *, writes: bool, after: Iterable[Clock]
    ) -> Clock:
        """Add an operation of ``stream`` on ``nbytes`` bytes at ``start``, ordered after ``after``.

        Returns:
            The clock of the operation.

        Raises:
            OverlapError: an earlier access to these bytes is not ordered before this one. Nothing
                was recorded.
        """
        before = join(self.clock(stream), *after)
        count = before.get(stream, 0) + 1
        access = _Access(start, start + nbytes, stream, count, writes)
        for other in self._accesses:
            if (
                other.overlaps(access)
                and (writes or other.writes)
                and before.get(other.stream, 0) < other.count
            ):
                raise OverlapError(
                    f"{access} is not ordered after the {other}; {stream!r} has seen "
                    f"{before.get(other.stream, 0)} of {other.stream!r}: wait for its event first"
                )
        self._clocks[stream] = clock = {**before, stream: count}
        self._remember(access)
        return clock

    def _remember(self, access: _Access) -> None:
        """Record the access, and remove the parts of older ones that it supersedes.

        An operation that is ordered after this access is also ordered after those.
        """
        kept: list[_Access] = []
        for other in self._accesses:
            superseded = access.writes or (other.stream == access.stream and not other.writes)
            kept.extend(other.outside(access) if superseded else [other])
        kept.append(access)
        self._accesses = kept
