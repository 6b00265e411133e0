"""The last events over ranges of device memory: what the next user of a range must wait for."""

from __future__ import annotations

import threading

from ..schedule.arena import Place
from .accelerators.base import Event


class RangeEvents:
    """A short list of (place, event); one range inside another takes its entry's place.

    For any thread.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Place, Event]] = []
        self._lock = threading.Lock()

    def over(self, place: Place) -> list[Event]:
        """Events of all ranges that overlap ``place``."""
        with self._lock:
            return [event for used, event in self._events if used.overlaps(place)]

    def set(self, place: Place, event: Event) -> None:
        """``place`` was last used up to ``event``, which came after whatever overlaps it."""
        begin, end = place.offset, place.offset + place.nbytes
        with self._lock:
            self._events = [
                (used, last)
                for used, last in self._events
                if not (begin <= used.offset and used.offset + used.nbytes <= end)
            ]
            self._events.append((place, event))
