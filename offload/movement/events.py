"""The last events over ranges of device memory, which the next user of a range must wait for."""

from __future__ import annotations

import threading

from ..schedule.arena import Place
from .accelerators.base import Event


class RangeEvents:
    """A short list of (place, event); a new range replaces the entries that lie inside it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Place, Event]] = []
        self._lock = threading.Lock()

    def over(self, place: Place) -> list[Event]:
        """Return the events of all ranges that overlap ``place``."""
        with self._lock:
            return self._overlapping(place)

    def set(self, place: Place, event: Event) -> None:
        """Record ``event`` as the last use of ``place``.

        It must be ordered after all recorded events of ranges that overlap ``place``.
        """
        with self._lock:
            self._events = [*self._beyond(place), (place, event)]

    # Separate methods, not inlined into the lock's blocks: see tests/tidy/test_locks.py.

    def _overlapping(self, place: Place) -> list[Event]:
        return [event for used, event in self._events if used.overlaps(place)]

    def _beyond(self, place: Place) -> list[tuple[Place, Event]]:
        begin, end = place.offset, place.offset + place.nbytes
        return [
            (used, last)
            for used, last in self._events
            if not (begin <= used.offset and used.offset + used.nbytes <= end)
        ]
