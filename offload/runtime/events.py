"""The last events over ranges of device memory: what the next user of a range must wait for."""

from __future__ import annotations

from ..schedule.arena import Place
from .accelerators.base import Event


class RangeEvents:
    """A short list of (place, event); an event that is done is forgotten when it is next seen."""

    def __init__(self) -> None:
        self._events: list[tuple[Place, Event]] = []

    def over(self, place: Place) -> list[Event]:
        """Events of all ranges that overlap ``place``."""
        return [event for used, event in self._events if used.overlaps(place)]

    def set(self, place: Place, event: Event) -> None:
        """``place`` was last used up to ``event``, which came after whatever overlaps it."""
        inside = place.offset, place.offset + place.nbytes
        self._events = [
            (used, last)
            for used, last in self._events
            if not (inside[0] <= used.offset and used.offset + used.nbytes <= inside[1])
        ]
        self._events.append((place, event))
