"""Rate limits: make work take the time of a given rate, independent of the real machine."""

from __future__ import annotations

import time

__all__ = ["Pace"]


class Pace:
    """A lane with a given rate: ``hold`` blocks until the lane would have finished its work.

    Work that was ready while the lane was busy begins when the previous work was due, not when this
    thread woke up. A series of pieces is therefore not slower than the lane. Not thread-safe.

    Args:
        per_s: amount per second; ``None`` means no limit.
        latency_s: time added to every piece.
    """

    def __init__(self, per_s: float | None, latency_s: float = 0.0) -> None:
        self._per_s, self._latency_s = per_s, latency_s
        self.free_ns = 0  # when the last piece was due

    def hold(self, amount: float, ready_ns: int) -> None:
        """Block until ``amount`` of work, ready to begin at ``ready_ns``, is due."""
        needed_s = self._latency_s + (amount / self._per_s if self._per_s is not None else 0.0)
        self.free_ns = max(ready_ns, self.free_ns) + int(needed_s * 1e9)
        sleep_until(self.free_ns)


def sleep_until(instant_ns: int) -> None:
    """Block, without holding the GIL, until ``time.perf_counter_ns`` reaches an instant."""
    while (left_ns := instant_ns - time.perf_counter_ns()) > 0:
        time.sleep(left_ns / 1e9)
