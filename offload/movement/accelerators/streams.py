"""The accelerator for any device that torch serves with streams and events, such as a GPU.

It uses side streams for copies and updates, and page-locked host memory. Importing the module needs
no device; constructing the accelerator does.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import LifecycleError, format_bytes
from ...facts.rates import Rates
from ...facts.trace import Instant
from ...optim.activation_blocks import ActivationBlocks
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
    memory: Sequence[torch.Tensor]  # kept alive until the copy ends


class _Maker:
    """Creates streams and events of one device."""

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
    """One copy direction: a stream, and a thread that reports the end of each copy in order."""

    def __init__(self, name: str, make: _Maker, clock: StreamClock) -> None:
        self.stream = make.stream()
        # Only work of this stream uses it, which runs in order.
        self.staging: torch.Tensor | None = None
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
        """Enqueue all ``(dst, src)`` pieces of one copy, then the work that ``then`` adds."""

        def work() -> None:
            for dst, src in pieces:
                dst.copy_(src, non_blocking=True)
            if then is not None:
                then()

        nbytes = sum(dst.numel() for dst, _ in pieces)
        return self.run(work, nbytes, [t for pair in pieces for t in pair], after, on_done)

    def run(
        self, work: Callable[[], None], nbytes: int, memory: Sequence[torch.Tensor],
        after: Sequence[Event], on_done: OnDone,
    ) -> Event:  # fmt: skip
        """Enqueue what ``work`` does: a copy of ``nbytes`` that uses ``memory``."""
        started, finished = self._make.event(timing=True), self._make.event(timing=True)
        with self._make.on(self.stream):
            for event in after:
                self.stream.wait_event(_event_of(event))
            started.event.record(self.stream)
            work()
            finished.event.record(self.stream)
        self._copies.put(_Copy(started, finished, nbytes, on_done, memory))
        return finished

    def stage(self, nbytes: int) -> None:
        """Allocate memory through which packed bytes pass, or free it."""
        self.staging = None
        if nbytes:
            with self._make.on(self.stream):
                self.staging = torch.empty(nbytes, dtype=torch.uint8, device=self._make.device)

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
            # Drop the tensors before the callback. The next user must hold the last reference, so
            # that the memory is freed only after that use.
            del copy
            deliver(told, done)
            del told, done  # keeps nothing alive while the queue is empty

    def close(self) -> None:
        """Finish the queued copies and join the thread."""
        self._copies.put(None)
        self._thread.join()


def _event_of(event: Event) -> Any:
    if not isinstance(event, _StreamEvent):
        raise TypeError(f"an event of another accelerator: {event!r}")
    return event.event


class StreamsAccelerator:
    """A device with streams. See ``Accelerator``.

    Args:
        device: of any kind that torch has streams for, with an index.
    """

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
        self._compute: Any = None  # the stream that computes, once it has asked for ``stream``
        self._update, self._gather = self._make.stream(urgent=True), self._make.stream()

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse_closed()
        memory = aligned_bytes(nbytes, self.device)
        # The allocator may reuse memory with pending work on its own stream; ours are different.
        self.synchronize()
        return memory

    def free(self, memory: torch.Tensor) -> None:
        memory.untyped_storage().resize_(0)

    def page_lock(self, address: int, nbytes: int) -> bool:
        self._refuse_closed()
        if self._vendor.register is None:
            self._warn_pageable(nbytes, "PyTorch has no call for it on this device", "")
            return False
        # Registered in one call: CUDA refuses any copy, also a user's, that crosses the border of
        # two registered pieces. Recorded before the call: a signal that arrives during it raises as
        # soon as the driver returns.
        self._locked.append((address, nbytes))
        try:
            self._vendor.register(address, nbytes, self.device)
        except RuntimeError as error:
            self._locked.remove((address, nbytes))
            self._warn_pageable(nbytes, str(error), f"; {LOCK_REMEDY}")
            return False
        return True

    def page_unlock(self, address: int, nbytes: int) -> None:
        mine = [each for each in self._locked if address <= each[0] < address + nbytes]
        for each in mine:
            assert self._vendor.unregister is not None
            self._vendor.unregister(each[0])
            self._locked.remove(each)

    def empty_cache(self) -> None:
        torch.get_device_module(self.device).empty_cache()

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
        """Split a copy so that each piece lies in one registered piece of memory, or in none.

        Returns:
            ``(host, device)`` pairs.
        """
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
        # PyTorch's allocator keeps freed memory for the stream that it was allocated on. On the
        # stream of compute, what comes back takes the place of what was offloaded. The copy then
        # waits for work that compute has queued so far, which may still use that memory.
        compute = self._compute
        stream = self._in.stream if compute is None else compute
        with self._make.on(stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if compute is not None:
                event = self._make.event(timing=False)
                event.event.record(stream)
                self._in.stream.wait_event(event.event)
        return memory

    def fetch(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        if blocks is None:
            return self.copy_in(dst, src, after=after, on_done=on_done)

        def unpack() -> None:
            for window, there, staged in self._staged(self._in, dst, blocks):
                for host, device in self._pieces(src[there], staged):
                    device.copy_(host, non_blocking=True)
                blocks.unpack(staged, dst[window])

        return self._in.run(unpack, src.numel(), [dst, src], after, on_done)

    def spill(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        if blocks is None:
            return self.copy_out(dst, src, after=after, on_done=on_done)

        def pack() -> None:
            for window, there, staged in self._staged(self._out, src, blocks):
                blocks.pack(src[window], staged)
                for host, device in self._pieces(dst[there], staged):
                    host.copy_(device, non_blocking=True)

        return self._out.run(pack, dst.numel(), [dst, src], after, on_done)

    def stage(self, nbytes: int) -> None:
        self._in.stage(nbytes)
        self._out.stage(nbytes)

    def _staged(
        self, lane: _CopyStream, memory: torch.Tensor, blocks: ActivationBlocks
    ) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield windows of ``memory``: their bytes there, and packed, and memory to pack in."""
        self._refuse_closed()
        assert lane.staging is not None
        for window, there in blocks.windows(memory.numel()):
            yield window, there, lane.staging[: there.stop - there.start]

    def keep(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._make.current())

    # -- compute --------------------------------------------------------------------------------

    def record(self) -> Event:
        event = self._make.event(timing=False)
        event.event.record(self._make.current())
        return event

    def stream(self) -> Hashable:
        self._compute = self._make.current()
        stream: Hashable = self._compute
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
            raise LifecycleError(f"the accelerator {str(self.device)!r} is closed")

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        try:
            self._in.close()
            self._out.close()
            self.synchronize()
        finally:  # after a device error nothing runs on it any more
            while self._locked:
                address, _ = self._locked.pop()
                assert self._vendor.unregister is not None
                self._vendor.unregister(address)
