"""A device that torch serves with streams and events: a GPU of any vendor.

Side streams for copies and updates, page-locked host memory.  Importing it needs no device;
constructing it does.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import OffloadError, format_bytes
from ...facts.rates import Rates
from ...facts.trace import Instant
from .base import CopyDone, Event, Fill, OnDone, aligned_bytes, copied_bytes, deliver, halves
from .stream_clock import StreamClock, StreamInstant
from .vendors import LOCK_REMEDY, VENDORS, Vendor

log = logging.getLogger("overspill")


class _StreamEvent:
    """A point of a stream."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class _Copy:
    started: _StreamEvent
    finished: _StreamEvent
    nbytes: int
    on_done: OnDone
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]  # kept until its end


class _Maker:
    """Makes streams and events of one device."""

    def __init__(self, device: torch.device, vendor: Vendor) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self._options, self._urgent = dict(vendor.event_options), dict(vendor.urgent)

    def stream(self, *, urgent: bool = False) -> Any:
        return self.module.Stream(device=self.device, **(self._urgent if urgent else {}))

    def event(self, *, timing: bool) -> _StreamEvent:
        return _StreamEvent(self.module.Event(enable_timing=timing, **self._options))

    def on(self, stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.module.stream(stream)
        return context

    def current(self) -> Any:
        return self.module.current_stream(self.device)


class _CopyStream:
    """One direction: a stream, and a thread that tells of each copy's end, in order."""

    def __init__(self, name: str, make: _Maker, clock: StreamClock) -> None:
        self.stream = make.stream()
        self._make, self._clock = make, clock
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"overspill-{name}", daemon=True)
        self._thread.start()

    def copy(
        self,
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Event],
        on_done: OnDone,
        then: Callable[[], None] | None = None,
    ) -> Event:
        """Gives the stream all ``(dst, src)`` pieces of one copy, and what ``then`` has it do."""
        started, finished = self._make.event(timing=True), self._make.event(timing=True)
        with self._make.on(self.stream):
            for event in after:
                self.stream.wait_event(_event_of(event))
            started.event.record(self.stream)
            for dst, src in pieces:
                dst.copy_(src, non_blocking=True)
            if then is not None:
                then()
            finished.event.record(self.stream)
        nbytes = sum(dst.numel() for dst, _ in pieces)
        self._copies.put(_Copy(started, finished, nbytes, on_done, pieces))
        return finished

    def _run(self) -> None:
        torch.accelerator.set_device_index(self._make.device)
        while (copy := self._copies.get()) is not None:
            try:
                copy.finished.synchronize()
                self._clock.saw(copy.finished.event, time.perf_counter_ns())
                started_ns = self._clock.ns(copy.started.event)
                finished_ns = self._clock.ns(copy.finished.event)
                done = CopyDone(started_ns, finished_ns, copy.nbytes)
            except BaseException as error:
                now_ns = time.perf_counter_ns()
                done = CopyDone(now_ns, now_ns, copy.nbytes, error)
            told = copy.on_done
            # Before anybody is told: who uses its tensors next frees them after that use.
            del copy
            deliver(told, done)
            del told, done  # nor may what they hold live on while the queue is empty

    def close(self) -> None:
        """Lets what was queued end, and joins the thread."""
        self._copies.put(None)
        self._thread.join()


def _event_of(event: Event) -> Any:
    if not isinstance(event, _StreamEvent):
        raise TypeError(f"an event of another accelerator: {event!r}")
    return event.event


class StreamsAccelerator:
    """See ``Accelerator``.  ``device`` is of any kind that torch has streams for, with an index."""

    limits = Rates()
    has_device_memory = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self._vendor = VENDORS.get(device.type, Vendor())
        self._locked: list[tuple[int, int]] = []  # (address, bytes) of each registered piece
        self._warned = False
        self._lock = threading.Lock()
        self._closed = False
        self._make = _Maker(device, self._vendor)
        base = self._make.event(timing=True).event
        base.record(self._make.current())
        self._clock = StreamClock(base)
        self._in = _CopyStream("copy_in", self._make, self._clock)
        self._out = _CopyStream("copy_out", self._make, self._clock)
        self._update, self._gather = self._make.stream(urgent=True), self._make.stream()

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse_closed()
        memory = aligned_bytes(nbytes, self.device)
        # The memory may have had users on the stream that the allocator knows; ours are others.
        self.synchronize()
        return memory

    def free(self, memory: torch.Tensor) -> None:
        memory.untyped_storage().resize_(0)

    def page_lock(self, address: int, nbytes: int) -> bool:
        self._refuse_closed()
        if self._vendor.register is None:
            self._warn_pageable(nbytes, "PyTorch has no call for it on this device", "")
            return False
        # As a whole: CUDA refuses any copy, a user's too, from one registered piece to the next.
        # Noted before: a signal that came meanwhile is raised once the driver is through.
        self._locked.append((address, nbytes))
        try:
            self._vendor.register(address, nbytes, self.device)
        except RuntimeError as error:
            self._locked.remove((address, nbytes))
            self._warn_pageable(nbytes, str(error), f"; {LOCK_REMEDY}")
            return False
        return True

    def _warn_pageable(self, nbytes: int, reason: str, remedy: str) -> None:
        """Log the first refusal; the plan counts all of them."""
        if not self._warned:
            self._warned = True
            log.warning(
                "overspill: %s of host memory cannot be page-locked for %s (%s). It stays "
                "pageable: results are the same, but copies are slower and do not run beside "
                "compute%s", format_bytes(nbytes), self.device, reason, remedy,
            )  # fmt: skip

    def _pieces(
        self, host: torch.Tensor, device: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(host, device)`` pairs, each of which lies in one registered piece or in none."""
        start = host.data_ptr()
        stop = start + host.numel()
        borders = (each for at, nbytes in self._locked for each in (at, at + nbytes))
        cuts = {border - start for border in borders if start < border < stop}
        if not cuts:
            return [(host, device)]
        edges = [0, *sorted(cuts), host.numel()]
        return [(host[a:b], device[a:b]) for a, b in itertools.pairwise(edges)]

    # -- copies ---------------------------------------------------------------------------------

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._check(host=src, device=dst)
        pieces = [(device, host) for host, device in self._pieces(src, dst)]
        return self._in.copy(pieces, after, on_done)

    def unpack(
        self, slot: torch.Tensor, page: torch.Tensor, fill: Fill, *, after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:  # fmt: skip
        if page.device == self.device:
            self._refuse_closed()
            return self._in.copy([], after, on_done, lambda: fill(slot, page))
        weights, behind = halves(slot, page)
        self._check(host=page, device=behind)
        pieces = [(device, host) for host, device in self._pieces(page, behind)]
        return self._in.copy(pieces, after, on_done, lambda: fill(weights, behind))

    def copy_out(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._check(host=dst, device=src)
        return self._out.copy(self._pieces(dst, src), after, on_done)

    def _check(self, *, host: torch.Tensor, device: torch.Tensor) -> None:
        self._refuse_closed()
        copied_bytes(device, host)
        if host.device.type != "cpu" or device.device != self.device:
            raise ValueError(
                f"a copy is between host memory and {self.device}, got {host.device} and "
                f"{device.device}"
            )

    def lend(self, nbytes: int) -> torch.Tensor:
        self._refuse_closed()
        # From the memory of the stream that fills it: what compute has in line may go on using its
        # own, and the copy waits for none of that.
        with self._make.on(self._in.stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def fetch(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        return self.copy_in(dst, src, after=after, on_done=on_done)

    def spill(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        return self.copy_out(dst, src, after=after, on_done=on_done)

    def keep(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._make.current())

    # -- compute --------------------------------------------------------------------------------

    def record(self) -> Event:
        event = self._make.event(timing=False)
        event.event.record(self._make.current())
        return event

    def stream(self) -> Hashable:
        stream: Hashable = self._make.current()
        return stream

    def join(self, streams: Iterable[Hashable], memory: Iterable[torch.Tensor] = ()) -> None:
        current = self._make.current()
        others = [stream for stream in streams if stream != current]
        for stream in others:
            current.wait_stream(stream)
        for tensor in memory if others else ():
            tensor.record_stream(current)

    def instant(self) -> Instant:
        event = self._make.event(timing=True).event
        event.record(self._make.current())
        return StreamInstant(event, self._clock)

    def wait(self, event: Event) -> None:
        self._make.current().wait_event(_event_of(event))

    def used(self, memory: torch.Tensor) -> None:
        return None

    def update_stream(self) -> AbstractContextManager[object]:
        return self._make.on(self._update)

    def gather_stream(self) -> AbstractContextManager[object]:
        return self._make.on(self._gather)

    def allocated_bytes(self) -> tuple[int, int] | None:
        if not hasattr(torch.accelerator, "max_memory_allocated"):  # from torch 2.9 on
            return None
        now = torch.accelerator.memory_allocated(self.device)
        return now, torch.accelerator.max_memory_allocated(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    # -- ends -----------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise OffloadError(f"the accelerator {str(self.device)!r} is closed")

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        try:
            self._in.close()
            self._out.close()
            self.synchronize()
        finally:  # after an error of the device nothing of it runs any more
            while self._locked:
                address, _ = self._locked.pop()
                assert self._vendor.unregister is not None
                self._vendor.unregister(address)
