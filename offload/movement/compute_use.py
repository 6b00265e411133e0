"""Compute's use of device memory: until when it lasts, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..facts.trace import Trace
from ..schedule.arena import Place
from .accelerators.base import Accelerator, Event
from .events import RangeEvents


class ComputeUse:
    """Of ranges of memory that copies and updates use too.

    Attributes:
        waited_ns: by compute, in all.
    """

    def __init__(self, events: RangeEvents, accelerator: Accelerator, trace: Trace) -> None:
        self._events, self._accelerator, self._trace = events, accelerator, trace
        self.waited_ns = 0

    def mark(self, place: Place) -> None:
        """What the calling thread has given to the device so far uses ``place``; the next copy over
        it waits for that."""
        self._events.set(place, self._accelerator.record())

    def follow(self, place: Place) -> None:
        """The calling thread's compute waits for what was last done with ``place``."""
        for event in self._events.over(place):
            self._accelerator.wait(event)

    def wait_for(self, place: Place, lane: str) -> None:
        """``follow`` on the training thread: what blocks there is a wait of compute's."""
        self.wait_on(self._events.over(place), lane)

    def wait_on(self, events: Iterable[Event], lane: str) -> None:
        """Compute waits for events of ``lane``.  What is over already is no wait."""
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
        """Compute has waited until now, and goes on in the part of the model called ``name``."""
        self.waited_ns += time.perf_counter_ns() - started_ns
        self._trace.compute_waited(lane, name)
