"""Times of device events on the host's clock."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

SIGHTINGS = 256  # events that the host sees in one round, before the clocks are aligned again


class StreamClock:
    """Convert times of device events to the host's clock.

    Device events only give the time between two of them. The host sees an event some time after it
    happened, and sometimes soon after. The shortest delay among many observations shows how far the
    two clocks have drifted apart (Cristian, 1989).
    """

    def __init__(self, base: Any) -> None:
        """Synchronize with ``base``, a torch event with timing that was recorded just now."""
        base.synchronize()
        # One tuple, read without the lock: a signal handler may run while its thread holds it.
        self._base = base, time.perf_counter_ns()
        self._lock = threading.Lock()  # held by the threads that call ``saw``
        self._next = base  # the first event of this round, which becomes the next base
        self._seen = 0
        self._least_ns = math.inf

    def ns(self, event: Any) -> int:
        """Return when a passed torch event happened, as a ``time.perf_counter_ns``."""
        base, base_ns = self._base
        return base_ns + int(base.elapsed_time(event) * 1e6)

    def saw(self, event: Any, seen_ns: int) -> None:
        """Record that the host saw ``event`` over at ``seen_ns``."""
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
    """A point of a stream. See ``Instant``."""

    def __init__(self, event: Any, clock: StreamClock) -> None:
        self._event, self._clock = event, clock

    def ns(self) -> int | None:
        return self._clock.ns(self._event) if self._event.query() else None
