"""An NVIDIA GPU: side streams for copies and updates, page-locked host memory, CUDA events.

The only file that knows CUDA.  Importing it needs no GPU; constructing it does.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ...errors import OffloadError, format_bytes
from ...observe.rates import Rates
from .base import CopyDone, Event, OnDone, aligned_bytes, copied_bytes, deliver

PIECE_BYTES = 1 << 30  # page-locked at a time: larger registrations fail on some systems


class _CudaEvent:
    """A point of a CUDA stream.  ``blocking``: whoever waits for it sleeps, and does not spin."""

    def __init__(self, *, timing: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timing, blocking=True)

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class _Copy:
    started: _CudaEvent
    finished: _CudaEvent
    nbytes: int
    on_done: OnDone


class _CopyStream:
    """One direction: a stream, and a thread that tells of each copy's end, in order."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._device = device
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"overspill-{name}", daemon=True)
        self._thread.start()

    def copy(
        self,
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:
        """Gives the stream all ``(dst, src)`` pieces of one copy."""
        started, finished = _CudaEvent(timing=True), _CudaEvent(timing=True)
        with torch.cuda.stream(self.stream):
            for event in after:
                self.stream.wait_event(_event_of(event))
            started.event.record(self.stream)
            for dst, src in pieces:
                dst.copy_(src, non_blocking=True)
            finished.event.record(self.stream)
        nbytes = sum(dst.numel() for dst, _ in pieces)
        self._copies.put(_Copy(started, finished, nbytes, on_done))
        return finished

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (copy := self._copies.get()) is not None:
            error: BaseException | None = None
            took_ns = 0
            try:
                copy.finished.synchronize()
                took_ns = int(copy.started.event.elapsed_time(copy.finished.event) * 1e6)
            except BaseException as raised:
                error = raised
            now_ns = time.perf_counter_ns()
            deliver(copy.on_done, CopyDone(now_ns - took_ns, now_ns, copy.nbytes, error))

    def close(self) -> None:
        """Lets what was queued end, and joins the thread."""
        self._copies.put(None)
        self._thread.join()


def _event_of(event: Event) -> torch.cuda.Event:
    if not isinstance(event, _CudaEvent):
        raise TypeError(f"an event of another accelerator: {event!r}")
    return event.event


class CudaAccelerator:
    """See ``Accelerator``.  ``device`` is a CUDA device with an index."""

    kind = "cuda"
    limits = Rates()
    has_device_memory = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._locked: list[tuple[int, int]] = []  # (address, bytes) of each registered piece
        self._lock = threading.Lock()
        self._closed = False
        torch.cuda.init()
        self._in = _CopyStream("copy_in", device)
        self._out = _CopyStream("copy_out", device)
        self._update = torch.cuda.Stream(device)

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse_closed()
        memory = aligned_bytes(nbytes, self.device)
        # The memory may have had users on the stream that the allocator knows; ours are others.
        torch.cuda.synchronize(self.device)
        return memory

    def page_lock(self, address: int, nbytes: int) -> None:
        self._refuse_closed()
        runtime = torch.cuda.cudart()
        for start in range(address, address + nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, address + nbytes - start)
            with torch.cuda.device(self.device):
                result = runtime.cudaHostRegister(start, length, 0)
            if result != runtime.cudaError.success:
                raise OffloadError(
                    f"could not page-lock {format_bytes(length)} of host memory at {start:#x} for "
                    f"{self.device} (CUDA error {int(result)}); "
                    f"{format_bytes(sum(n for _, n in self._locked))} of {format_bytes(nbytes)} "
                    "are locked; lower host_memory, or raise the memory limit of this container"
                )
            self._locked.append((start, length))

    def _pieces(
        self, host: torch.Tensor, device: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(host, device)`` pairs none of which crosses from one registered piece to the next."""
        start = host.data_ptr()
        stop = start + host.numel()
        cuts = [address - start for address, _ in self._locked if start < address < stop]
        edges = [0, *sorted(cuts), host.numel()]
        return [(host[a:b], device[a:b]) for a, b in itertools.pairwise(edges)]

    # -- copies ---------------------------------------------------------------------------------

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._check(host=src, device=dst)
        pieces = [(device, host) for host, device in self._pieces(src, dst)]
        return self._in.copy(pieces, after, on_done)

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

    # -- compute --------------------------------------------------------------------------------

    def record(self) -> Event:
        event = _CudaEvent(timing=False)
        event.event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(_event_of(event))

    def used(self, memory: torch.Tensor) -> None:
        return None

    def update_stream(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._update)
        return stream

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    # -- ends -----------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise OffloadError(f"the accelerator {str(self.device)!r} is closed")

    def close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        self._in.close()
        self._out.close()
        torch.cuda.synchronize(self.device)
        runtime = torch.cuda.cudart()
        while self._locked:
            address, _ = self._locked.pop()
            runtime.cudaHostUnregister(address)
