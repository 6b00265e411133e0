"""Compute's use of device memory: the last events over its ranges, and waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from ..facts.trace import Trace
from ..schedule.arena import Place
from .accelerators.base import Accelerator, Event


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


class ComputeUse:
    """Orders compute with copies and updates that use the same device memory.

    Attributes:
        waited_ns: the total time that compute has waited.
    """

    def __init__(self, events: RangeEvents, accelerator: Accelerator, trace: Trace) -> None:
        self._events, self._accelerator, self._trace = events, accelerator, trace
        self.waited_ns = 0

    def mark(self, place: Place) -> None:
        """Record that the calling thread's compute so far uses ``place``.

        The next copy over this place waits for that work.
        """
        self._events.set(place, self._accelerator.record())

    def follow(self, place: Place) -> None:
        """Order the calling thread's compute after the last use of ``place``."""
        for event in self._events.over(place):
            self._accelerator.wait(event)

    def wait_for(self, place: Place, lane: str) -> None:
        """Do as ``follow`` on the training thread, and count time that it blocks as waiting."""
        self.wait_on(self._events.over(place), lane)

    def wait_on(self, events: Iterable[Event], lane: str) -> None:
        """Order compute after events of ``lane``. Events that are over do not count as a wait."""
        ahead = [event for event in events if not event.done()]
        if not ahead:
            return
        before = self._trace.compute_waits()
        started_ns = time.perf_counter_ns()
        for event in ahead:
            self._accelerator.wait(event)
        if before is not None:
            self.waited(lane, started_ns, before)

    def waited(self, lane: str, started_ns: int, name: str) -> None:
        """Record a wait of compute that ends now, before it continues in the module ``name``."""
        self.waited_ns += time.perf_counter_ns() - started_ns
        self._trace.compute_waited(lane, name)
