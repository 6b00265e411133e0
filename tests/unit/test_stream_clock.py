"""The device's clock, set by the host's: through delays, drift and events of long ago."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest

from overspill.movement.accelerators.stream_clock import SIGHTINGS, StreamClock, StreamInstant


@dataclass
class Event:
    """Happened at ``host_ns``, on a device whose clock goes ``drift`` too fast."""

    host_ns: int
    drift: float
    passed: bool = True

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        return (other.host_ns - self.host_ns) * (1 + self.drift) / 1e6


@pytest.mark.parametrize("drift", [0.0, 1e-5, -1e-5])
def test_it_follows_the_host(drift: float) -> None:
    draw = random.Random(0)
    start = time.perf_counter_ns()
    clock = StreamClock(Event(start, drift))
    for number in range(20 * SIGHTINGS):  # for 1,000 s: by then 10 ms are between the two
        event = Event(start + number * 200_000_000, drift)
        clock.saw(event, event.host_ns + int(20_000 + draw.expovariate(1 / 1e6)))
        if number > 2 * SIGHTINGS:
            # A round takes 51 s, 0.5 ms of drift; two of them are between a base and its use.
            assert abs(clock.ns(event) - event.host_ns) < 1_300_000


def test_nothing_is_seen_before_it_happened() -> None:
    start = time.perf_counter_ns()
    clock = StreamClock(Event(start, 0.0))
    event = Event(start + 1_000_000_000, 0.0)
    clock.saw(event, event.host_ns - 5_000)
    assert clock.ns(event) <= event.host_ns - 5_000


def test_an_instant_that_is_to_come_has_no_time() -> None:
    start = time.perf_counter_ns()
    event = Event(start + 1_000, 0.0, passed=False)
    instant = StreamInstant(event, StreamClock(Event(start, 0.0)))
    assert instant.ns() is None
    event.passed = True
    assert instant.ns() is not None
