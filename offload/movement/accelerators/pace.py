"""Work that takes the time a set rate says, whatever the machine underneath needs."""

from __future__ import annotations

import time

__all__ = ["Pace"]


class Pace:
    """One lane of a set rate: ``hold`` blocks until it would have done an amount of work.

    Work that was ready while the lane was busy begins when the work before it was due, not when
    this thread woke up, so that a row of pieces is not slower than the lane.  For one thread.

    Args:
        per_s: amount per second; ``None`` does not limit.
        latency_s: added to every piece.
    """

    def __init__(self, per_s: float | None, latency_s: float = 0.0) -> None:
        self._per_s, self._latency_s = per_s, latency_s
        self.free_ns = 0  # when the last piece was due

    def hold(self, amount: float, ready_ns: int) -> None:
        """Blocks until ``amount``, ready to begin at ``ready_ns``, is due."""
        needed_s = self._latency_s + (amount / self._per_s if self._per_s is not None else 0.0)
        self.free_ns = max(ready_ns, self.free_ns) + int(needed_s * 1e9)
        sleep_until(self.free_ns)


def sleep_until(instant_ns: int) -> None:
    """Blocks, without the GIL, until ``time.perf_counter_ns`` has reached an instant."""
    while (left_ns := instant_ns - time.perf_counter_ns()) > 0:
        time.sleep(left_ns / 1e9)
