"""When a device came to its events, by the host's clock."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

SIGHTINGS = 256  # of events by the host, after which the device's clock is set anew


class StreamClock:
    """Sets a device's clock, whose events tell the time between two of them alone, by the host's.

    The host sees an event some time after it has happened, by chance soon after: the shortest
    delay among many sightings tells how far the two clocks have drifted apart (Cristian, 1989).
    """

    def __init__(self, base: Any) -> None:
        """``base``: an event of torch's that keeps its time, recorded just now."""
        base.synchronize()
        # Together: read without the lock, which a signal handler might find held by its own thread.
        self._base = base, time.perf_counter_ns()
        self._lock = threading.Lock()  # of whoever sees events
        self._next = base  # the first event of this round: what the next one counts from
        self._seen = 0
        self._least_ns = math.inf

    def ns(self, event: Any) -> int:
        """When a passed event of torch's happened, by ``time.perf_counter_ns``."""
        base, base_ns = self._base
        return base_ns + int(base.elapsed_time(event) * 1e6)

    def saw(self, event: Any, seen_ns: int) -> None:
        """The host has just seen that ``event`` is over."""
        with self._lock:
            late_ns = seen_ns - self.ns(event)
            if late_ns < 0:  # it cannot have been seen before it happened
                base, base_ns = self._base
                self._base = base, base_ns + late_ns
                late_ns = 0
            if self._seen == 0:
                self._next = event
            self._seen += 1
            self._least_ns = min(self._least_ns, late_ns)
            if self._seen == SIGHTINGS:
                self._base = self._next, self.ns(self._next) + int(self._least_ns)
                self._seen, self._least_ns = 0, math.inf


class StreamInstant:
    """See ``Instant``: a point of a stream."""

    def __init__(self, event: Any, clock: StreamClock) -> None:
        self._event, self._clock = event, clock

    def ns(self) -> int | None:
        return self._clock.ns(self._event) if self._event.query() else None
