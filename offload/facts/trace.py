"""What happened when: spans of every lane, in memory, written as a Chrome trace on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

LANES = ("compute", "copy_in", "copy_out", "read", "write", "update")
LONGEST = 200_000  # spans kept; older ones are forgotten


class Span(NamedTuple):
    """Work of one lane between two instants of ``time.perf_counter_ns``."""

    lane: str
    name: str
    started_ns: int
    finished_ns: int
    nbytes: int


class Instant(Protocol):
    """A moment in compute, which on a device may still be to come."""

    def ns(self) -> int | None:
        """By ``time.perf_counter_ns``; ``None`` while compute has not come to it."""
        ...


class HostInstant:
    """The moment at which it was made: compute of the host."""

    __slots__ = ("_ns",)

    def __init__(self) -> None:
        self._ns = time.perf_counter_ns()

    def ns(self) -> int:
        return self._ns


class _Pending(NamedTuple):
    """A span between two moments that compute may not have come to; ``spans`` is where it goes."""

    spans: deque[Span]
    lane: str
    name: str
    started: Instant
    finished: Instant


class Level(NamedTuple):
    """Bytes in use of device and host memory, from an instant on; of those where compute is, what
    autograd saved."""

    at_ns: int
    device_bytes: int
    host_bytes: int
    saved_bytes: int = 0


@dataclass(frozen=True)
class TierBytes:
    """What a tier may hold, and what is held of it from the start to the end of a run."""

    budget_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class StepMark:
    """One optimizer step: from the end of the step before to its own end."""

    index: int
    started_ns: int
    finished_ns: int


class Ranges(Protocol):
    """Tells a profiler what goes on, where one is active."""

    def begin(self, name: str) -> None:
        """Begin a range of this name in which the training thread computes, until ``end``."""

    def end(self) -> None: ...

    def during(self, lane: str, name: str) -> AbstractContextManager[object]:
        """A range of the block's length in the present thread."""
        ...


NO_RANGE = nullcontext()


class Trace:
    """A bounded recorder that all threads of an engine write to; appends are atomic.

    ``instant``: a moment in compute, now.
    """

    def __init__(
        self,
        longest: int = LONGEST,
        origin_ns: int | None = None,
        ranges: Ranges | None = None,
        instant: Callable[[], Instant] = HostInstant,
    ) -> None:
        self._ranges, self.instant = ranges, instant
        self._spans: deque[Span] = deque(maxlen=longest)
        self._stalls: deque[Span] = deque(maxlen=longest)
        self._steps: deque[StepMark] = deque(maxlen=1000)
        self._levels: deque[Level] = deque(maxlen=longest)
        self._last_level = (-1, -1, -1)
        self.tiers: Mapping[str, TierBytes] = {}  # by name; empty where nothing is held
        if origin_ns is None:
            origin_ns = time.perf_counter_ns()
        self.origin_ns = self._last_step_end = origin_ns
        self._computing: tuple[str, Instant] | None = None
        self._stopped: Instant  # when compute last paused, or began to wait
        self._pending: deque[_Pending] = deque(maxlen=longest)
        self._resolving = threading.Lock()

    # -- recording ------------------------------------------------------------------------------

    def add(self, lane: str, name: str, started_ns: int, finished_ns: int, nbytes: int = 0) -> None:
        """Records work of ``lane``.  ``KeyError`` for a lane that does not exist."""
        if lane not in LANES:
            raise _no_lane(lane)
        self._spans.append(Span(lane, name, started_ns, finished_ns, nbytes))

    def stall(self, lane: str, started_ns: int, finished_ns: int, name: str) -> None:
        """Records that compute waited for ``lane``."""
        if lane not in LANES:
            raise _no_lane(lane)
        self._stalls.append(Span(lane, name, started_ns, finished_ns, 0))

    def level(self, at_ns: int, device_bytes: int, host_bytes: int, saved_bytes: int = 0) -> None:
        """Records how much memory is in use from now on; the same as before costs nothing."""
        used = (device_bytes, host_bytes, saved_bytes)
        if used != self._last_level:
            self._last_level = used
            self._levels.append(Level(at_ns, *used))

    def compute_resume(self, name: str) -> None:
        """Record that the training thread computes from now on, in the part called ``name``."""
        if self._computing is not None:
            self.compute_pause()
        if self._ranges is not None:
            self._ranges.begin(name)
        self._computing = (name, self.instant())

    def compute_waits(self) -> str | None:
        """The training thread waits from now on; what it was computing, if anything."""
        name = self.compute_pause()
        if name is None:
            self._stopped = self.instant()
        return name

    def compute_waited(self, lane: str, name: str) -> None:
        """Record that compute waited for ``lane``, and continues in the part called ``name``."""
        if lane not in LANES:
            raise _no_lane(lane)
        since = self._stopped
        self.compute_resume(name)
        assert self._computing is not None
        self._later(_Pending(self._stalls, lane, name, since, self._computing[1]))

    def compute_pause(self) -> str | None:
        """The training thread waits, or has left the model; what it was computing, if anything."""
        if self._computing is None:
            return None
        name, started = self._computing
        self._computing, self._stopped = None, self.instant()
        self._later(_Pending(self._spans, "compute", name, started, self._stopped))
        if self._ranges is not None:
            self._ranges.end()
        return name

    def _later(self, pending: _Pending) -> None:
        end_ns = None if self._pending else pending.finished.ns()
        if end_ns is not None and self._keep(pending, end_ns):  # at once, as on the host
            return
        self._pending.append(pending)
        self._resolve()

    @staticmethod
    def _keep(pending: _Pending, end_ns: int) -> bool:
        spans, lane, name, started, _ = pending
        start_ns = started.ns()
        if start_ns is None:  # on another stream, which has not come there
            return False
        spans.append(Span(lane, name, min(start_ns, end_ns), end_ns, 0))
        return True

    def _resolve(self) -> None:
        """Keep the spans that compute has finished; they end in order.

        Only one call at a time does this.  A signal handler that interrupts one returns at once,
        because waiting would deadlock.
        """
        if not self._resolving.acquire(blocking=False):
            return
        try:
            self._keep_finished()
        finally:
            self._resolving.release()

    def _keep_finished(self) -> None:
        while self._pending:
            end_ns = self._pending[0].finished.ns()
            if end_ns is None or not self._keep(self._pending[0], end_ns):
                return
            self._pending.popleft()

    def during(self, lane: str, name: str) -> AbstractContextManager[object]:
        """A range of the block for a profiler that is active; the span itself is added later."""
        return NO_RANGE if self._ranges is None else self._ranges.during(lane, name)

    @property
    def computing(self) -> bool:
        """Whether the training thread computes."""
        return self._computing is not None

    def mark_step(self, index: int, finished_ns: int) -> StepMark:
        """A step is over; it began where the one before ended."""
        mark = StepMark(index, self._last_step_end, finished_ns)
        self.add_step(mark)
        return mark

    def add_step(self, mark: StepMark) -> None:
        """Records a step that is over."""
        self._last_step_end = mark.finished_ns
        self._steps.append(mark)

    # -- reading --------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[StepMark, ...]:
        """The steps recorded, oldest first."""
        return tuple(self._steps)

    def spans(self, started_ns: int = 0, finished_ns: int = 1 << 62) -> list[Span]:
        """Return the spans that overlap the window; of compute, only finished ones."""
        self._resolve()
        return _inside(list(self._spans), started_ns, finished_ns)

    def stalls(self, started_ns: int = 0, finished_ns: int = 1 << 62) -> list[Span]:
        """Stalls that overlap the window, and are over."""
        self._resolve()
        return _inside(list(self._stalls), started_ns, finished_ns)

    def levels(self, started_ns: int = 0, finished_ns: int = 1 << 62) -> list[Level]:
        """Levels in the window; the first one begins with it."""
        inside: list[Level] = []
        for level in list(self._levels):
            if level.at_ns <= started_ns:
                inside = [level._replace(at_ns=started_ns)]
            elif level.at_ns < finished_ns:
                inside.append(level)
        return inside

    def covered_share(
        self, lanes: Sequence[str], started_ns: int = 0, finished_ns: int = 1 << 62
    ) -> float:
        """Share of the lanes' busy time in the window that lies under compute; 1 if none."""
        spans = self.spans(started_ns, finished_ns)
        compute = union((s.started_ns, s.finished_ns) for s in spans if s.lane == "compute")
        total = covered = 0
        for lane in lanes:
            busy = union((s.started_ns, s.finished_ns) for s in spans if s.lane == lane)
            total += length(busy)
            covered += length(intersection(busy, compute))
        return covered / total if total else 1.0


def _no_lane(lane: str) -> KeyError:
    return KeyError(f"no lane {lane!r}; lanes are {', '.join(LANES)}")


def _inside(spans: Iterable[Span], started_ns: int, finished_ns: int) -> list[Span]:
    """The parts inside the window.  Bytes count where a span ends, so that windows side by side
    count them once."""
    return [
        s._replace(
            started_ns=max(s.started_ns, started_ns),
            finished_ns=min(s.finished_ns, finished_ns),
            nbytes=s.nbytes if s.finished_ns <= finished_ns else 0,
        )
        for s in spans
        if s.finished_ns > started_ns and s.started_ns < finished_ns
    ]


Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same instants."""
    joined: list[Interval] = []
    for low, high in sorted(intervals):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The instants in both lists of disjoint, ordered intervals."""
    result: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low < high:
            result.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(intervals: Iterable[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(high - low for low, high in intervals)
