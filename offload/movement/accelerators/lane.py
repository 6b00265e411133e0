"""One direction of a simulated link: a thread that copies memory at a given rate."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .base import CopyDone, Event, OnDone, deliver
from .pace import Pace

__all__ = ["CopyJob", "CopyLane", "copy"]


@dataclass(frozen=True)
class CopyJob:
    """A queued copy.

    Attributes:
        finish: called when the copy is over, before ``on_done``.
        do: produces ``dst`` from ``src`` if that takes more than a copy.
    """

    dst: torch.Tensor
    src: torch.Tensor
    after: Sequence[Event]
    submitted_ns: int
    finish: Callable[[], None]
    on_done: OnDone
    do: Callable[[], None] | None = None


def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy without the GIL, on the calling thread only.

    ``Tensor.copy_`` would start a second set of compute threads.
    """
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), dst.numel())


class CopyLane:
    """A thread that runs queued copies in order. It owns the thread.

    Args:
        disturb: called on the thread before every copy; it may sleep or raise.
    """

    def __init__(
        self,
        name: str,
        bytes_s: float | None,
        latency_s: float,
        disturb: Callable[[str, int], None] | None,
    ) -> None:
        self._name, self._disturb = name, disturb
        self._pace = Pace(bytes_s, latency_s)
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"overspill-{name}", daemon=True)
        self._thread.start()

    def put(self, job: CopyJob) -> None:
        """Queue a copy."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queued copies and join the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            ready_ns = job.submitted_ns
            for event in job.after:
                if not event.done():
                    event.synchronize()
                    ready_ns = time.perf_counter_ns()
            started_ns = time.perf_counter_ns()
            error: BaseException | None = None
            try:
                if self._disturb is not None:
                    self._disturb(self._name, job.dst.numel())
                if job.do is None:
                    copy(job.dst, job.src)
                else:
                    job.do()
                self._pace.hold(job.dst.numel(), ready_ns)
            except BaseException as raised:
                error = raised
            finished_ns = time.perf_counter_ns()
            job.finish()
            deliver(job.on_done, CopyDone(started_ns, finished_ns, job.dst.numel(), error))
            del job  # keeps no tensors alive while the queue is empty
