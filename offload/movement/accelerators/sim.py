"""A simulated device in host memory, which runs all code paths of a GPU and finds missing waits.

The device arena is separate memory, so a changed host copy never shows on the device. Copies are
real. They run on one thread per direction and take as long as the given rates say. Compute runs
synchronously in the calling thread.

A vector clock per stream checks that the engine orders compute after the copies, for all possible
timings. An access that is not ordered after the previous one raises, even if it happens to read the
right bytes.

These order operations: the order of a stream; ``after`` and ``wait``; and, for later work of a
thread, an event whose ``done()`` returned true or whose ``synchronize()`` returned, or a call of
the copy's ``on_done`` on that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ...errors import LifecycleError
from ...facts.rates import Rates
from ...io_engine import allocate_host
from ...io_engine.one_shot_event import OneShotEvent
from ...optim.activation_blocks import ActivationBlocks
from .base import Event, Fill, InOrder, OnDone, copied_bytes, halves
from .lane import CopyJob, CopyLane, copy
from .ordering import Clock, Ordering, join

COMPUTE, COPY_IN, COPY_OUT = "compute", "copy_in", "copy_out"
UPDATE, GATHER = "update", "gather"
POISON = 0xFF  # NaN in every float format that weights have


class _Thread(threading.local):
    """Per host thread: its current stream, and the clock of what it knows to be over."""

    def __init__(self) -> None:
        self.stream = COMPUTE
        self.known: Clock = {}


class _SimEvent:
    """A point of a stream: over once ``passed`` is set, ordered after ``clock``."""

    def __init__(self, owner: SimAccelerator, clock: Clock) -> None:
        self.owner, self.clock = owner, clock
        self.passed = OneShotEvent()

    def done(self) -> bool:
        if self.passed.is_set():
            self.owner._learn(self.clock)
            return True
        return False

    def synchronize(self) -> None:
        self.passed.wait()
        self.owner._learn(self.clock)


class SimAccelerator(InOrder):
    """A simulated device. See ``Accelerator``.

    Args:
        rates: rates of the simulated machine; ``None``, also as a field, means no limit. This class
            applies the link rates. The classes that read disks, update and compute apply the
            others, which they find in ``limits``.
        disturb: called as ``disturb(lane, nbytes)`` on the copying thread before each copy. Tests
            sleep in it, or raise an error that is then delivered as the copy's.
    """

    name = "sim"
    has_device_memory = True

    def __init__(
        self, rates: Rates | None = None, disturb: Callable[[str, int], None] | None = None
    ) -> None:
        self.device = torch.device("cpu")
        rates = self.limits = rates if rates is not None else Rates()
        latency = rates.link_latency_s or 0.0
        self._ordering = Ordering()
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._arenas: list[torch.Tensor] = []
        self._last: dict[str, _SimEvent] = {}
        self._closed = False
        self._lanes = {
            COPY_IN: CopyLane("copy_in", rates.h2d_bytes_s, latency, disturb),
            COPY_OUT: CopyLane("copy_out", rates.d2h_bytes_s, latency, disturb),
        }

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse_closed()
        # As on a real device, forked children do not share it. Its last view frees it.
        arena = torch.from_numpy(allocate_host(nbytes).array).fill_(POISON)
        self._arenas.append(arena)
        return arena

    def free(self, memory: torch.Tensor) -> None:
        # The last view frees it.
        self._arenas = [arena for arena in self._arenas if arena is not memory]

    def page_lock(self, address: int, nbytes: int) -> bool:
        return True

    def _on_device(self, memory: torch.Tensor) -> bool:
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        for arena in self._arenas:
            low, high = arena.data_ptr(), arena.data_ptr() + arena.numel()
            if low <= start and stop <= high:
                return True
            if start < high and low < stop:
                raise ValueError(f"{memory.nbytes} bytes at {start:#x} cross the arena's border")
        return False

    # -- copies ---------------------------------------------------------------------------------

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        return self._copy(COPY_IN, dst, src, after, on_done)

    def unpack(
        self, slot: torch.Tensor, page: torch.Tensor, fill: Fill, *, after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:  # fmt: skip
        if self._on_device(page):
            return self._unpack_there(slot, page, fill, after, on_done)
        weights, behind = halves(slot, page)

        def do() -> None:
            copy(behind, page)
            fill(weights, behind)

        return self._copy(COPY_IN, behind, page, after, on_done, slot, do)

    def copy_out(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        return self._copy(COPY_OUT, dst, src, after, on_done)

    def lend(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def fetch(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        if blocks is None:
            return self._copy_loose(COPY_IN, dst, src, after, on_done)
        return self._copy_loose(COPY_IN, src, src, after, on_done, lambda: blocks.unpack(src, dst))

    def spill(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        if blocks is None:
            return self._copy_loose(COPY_OUT, dst, src, after, on_done)
        return self._copy_loose(COPY_OUT, dst, dst, after, on_done, lambda: blocks.pack(src, dst))

    def _unpack_there(
        self, slot: torch.Tensor, page: torch.Tensor, fill: Fill, after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:  # fmt: skip
        self._refuse_closed()
        events = [self._own(event) for event in after]
        with self._lock:
            before = [self._thread.known, *(event.clock for event in events)]
            for memory, writes in ((page, False), (slot, True)):
                clock = self._ordering.access(
                    COPY_IN, memory.data_ptr(), memory.numel(), writes=writes, after=before
                )
            event, nothing = _SimEvent(self, clock), page[:0]
            over, now_ns = self._over(event), time.perf_counter_ns()
            job = CopyJob(nothing, nothing, events, now_ns, over, on_done, lambda: fill(slot, page))
            self._lanes[COPY_IN].put(job)
            self._last[COPY_IN] = event
        return event

    def _copy_loose(
        self, lane: str, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Event],
        on_done: OnDone, do: Callable[[], None] | None = None,
    ) -> Event:  # fmt: skip
        """Copy memory outside the arena, whose addresses are reused and cannot be checked.

        A missing wait shows as poison in the result instead.  ``do`` replaces the plain copy.
        """
        self._refuse_closed()
        copied_bytes(dst, src)
        events = [self._own(event) for event in after]
        with self._lock:
            before = [self._thread.known, *(event.clock for event in events)]
            event = _SimEvent(self, self._ordering.follow(lane, before))
            now_ns = time.perf_counter_ns()
            over = self._over(event)
            self._lanes[lane].put(CopyJob(dst, src, events, now_ns, over, on_done, do))
            self._last[lane] = event
        return event

    def _copy(
        self,
        lane: str,
        dst: torch.Tensor,
        src: torch.Tensor,
        after: Sequence[Event],
        on_done: OnDone,
        touched: torch.Tensor | None = None,
        do: Callable[[], None] | None = None,
    ) -> Event:
        """Start a copy between host memory and the arena.

        Args:
            touched: the device memory that is written, if it is more than the copy's.
            do: the work that replaces the plain copy.
        """
        self._refuse_closed()
        copied_bytes(dst, src)
        device, host = (dst, src) if lane == COPY_IN else (src, dst)
        device = device if touched is None else touched
        if not self._on_device(device) or self._on_device(host) or host.device.type != "cpu":
            raise ValueError(f"{lane} is between host memory and this device's arena; got others")
        events = [self._own(event) for event in after]
        with self._lock:
            clock = self._ordering.access(
                lane,
                device.data_ptr(),
                device.numel(),
                writes=lane == COPY_IN,
                after=[self._thread.known, *(event.clock for event in events)],
            )
            event = _SimEvent(self, clock)
            now_ns = time.perf_counter_ns()
            over = self._over(event)
            self._lanes[lane].put(CopyJob(dst, src, events, now_ns, over, on_done, do))
            self._last[lane] = event
        return event

    def _over(self, event: _SimEvent) -> Callable[[], None]:
        def over() -> None:
            event.passed.set()
            self._learn(event.clock)

        return over

    # -- compute --------------------------------------------------------------------------------

    def record(self) -> Event:
        with self._lock:
            clock = self._ordering.follow(self._thread.stream, [self._thread.known])
        event = _SimEvent(self, clock)
        event.passed.set()
        return event

    def wait(self, event: Event) -> None:
        own = self._own(event)
        own.passed.wait()
        with self._lock:
            self._ordering.follow(self._thread.stream, [own.clock])

    def used(self, memory: torch.Tensor) -> None:
        if not self._on_device(memory):
            raise ValueError(f"{memory.nbytes} bytes at {memory.data_ptr():#x} are not on device")
        with self._lock:
            self._ordering.access(
                self._thread.stream,
                memory.data_ptr(),
                memory.nbytes,
                writes=True,
                after=[self._thread.known],
            )

    def update_stream(self) -> AbstractContextManager[object]:
        return self._on_stream(UPDATE)

    def gather_stream(self) -> AbstractContextManager[object]:
        return self._on_stream(GATHER)

    @contextmanager
    def _on_stream(self, stream: str) -> Iterator[None]:
        before = self._thread.stream
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def synchronize(self) -> None:
        with self._lock:
            events, clock = list(self._last.values()), self._ordering.everything()
        for event in events:
            event.passed.wait()
        self._learn(clock)

    # -- ends -----------------------------------------------------------------------------------

    def _own(self, event: Event) -> _SimEvent:
        if not isinstance(event, _SimEvent) or event.owner is not self:
            raise TypeError(f"an event of another accelerator: {event!r}")
        return event

    def _learn(self, clock: Clock) -> None:
        """Record that the calling thread knows ``clock`` to be over; its later work comes after."""
        self._thread.known = join(self._thread.known, clock)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LifecycleError("the accelerator 'sim' is closed")

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for lane in self._lanes.values():
                lane.close()
            self._arenas.clear()
