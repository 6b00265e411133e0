"""Disk transfers of the executor: the store, files read in place, and simulated rates."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..io_engine import Extent, IoEngine
from ..io_engine.file_ranges import FileRanges, RangeReader
from .accelerators.pace import Pace

__all__ = ["Disk", "Disks", "Moved", "PacedDisk"]

Bytes = NDArray[np.uint8]


class Moved(Protocol):
    """The end of a transfer; times are those of ``time.perf_counter_ns``."""

    @property
    def started_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def error(self) -> BaseException | None: ...


OnMoved = Callable[[Moved], None]


class Disk(Protocol):
    """An interface that moves whole extents."""

    def read(
        self, source: Extent | FileRanges, buffer: Bytes, *, urgent: bool = False, on_done: OnMoved
    ) -> object: ...

    def write(
        self, extent: Extent, buffer: Bytes, *, changing: bool = False, on_done: OnMoved
    ) -> object: ...


class Moving(Moved, Protocol):
    """A transfer that was started."""

    def wait(self) -> None: ...


class Disks:
    """The store, and the files that are read in place; either may be missing."""

    def __init__(self, io: IoEngine | None, files: RangeReader | None) -> None:
        self._io, self._files = io, files

    def read(
        self, source: Extent | FileRanges, buffer: Bytes, *, urgent: bool = False,
        on_done: OnMoved | None = None,
    ) -> Moving:  # fmt: skip
        """Start to fill a buffer; see ``IoEngine.read``."""
        if isinstance(source, FileRanges):
            assert self._files is not None, "no files are read in place"
            return self._files.read(source, buffer, urgent=urgent, on_done=on_done)
        assert self._io is not None, "nothing lives on disk"
        return self._io.read(source, buffer, urgent=urgent, on_done=on_done)

    def write(
        self, extent: Extent, buffer: Bytes, *, urgent: bool = False, changing: bool = False,
        on_done: OnMoved | None = None,
    ) -> Moving:  # fmt: skip
        """Start to write a buffer; see ``IoEngine.write``."""
        assert self._io is not None, "nothing lives on disk"
        return self._io.write(extent, buffer, urgent=urgent, changing=changing, on_done=on_done)


@dataclass(frozen=True)
class _Paced:
    started_ns: int
    finished_ns: int
    nbytes: int
    error: BaseException | None


@dataclass(frozen=True)
class _Job:
    start: Callable[..., Any]
    extent: Extent | FileRanges
    buffer: Bytes
    on_done: OnMoved
    submitted_ns: int


class _Direction:
    """A thread that moves one extent at a time, urgent ones first."""

    def __init__(self, name: str, bytes_s: float | None) -> None:
        self._pace = Pace(bytes_s)
        self._jobs: list[tuple[bool, int, _Job | None]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"overspill-{name}", daemon=True)
        self._thread.start()

    def put(self, job: _Job | None, urgent: bool = False) -> None:
        with self._changed:
            heapq.heappush(self._jobs, (not urgent, next(self._numbers), job))
            self._changed.notify()

    def _take(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs))
            return heapq.heappop(self._jobs)[2]

    def _run(self) -> None:
        while (job := self._take()) is not None:
            started_ns = time.perf_counter_ns()
            over = threading.Event()
            ticket = job.start(
                job.extent, job.buffer, urgent=True, on_done=lambda _, over=over: over.set()
            )
            over.wait()
            self._pace.hold(ticket.nbytes, job.submitted_ns)
            finished_ns = time.perf_counter_ns()
            job.on_done(_Paced(started_ns, finished_ns, ticket.nbytes, ticket.error))
            del job, ticket

    def close(self) -> None:
        self.put(None)
        self._thread.join()


class PacedDisk:
    """A ``Disk`` that limits reads and writes of real disks to given rates, on one lane each."""

    def __init__(self, disks: Disks, read_bytes_s: float | None, write_bytes_s: float | None):
        self._disks = disks
        self._reads = _Direction("sim-read", read_bytes_s)
        self._writes = _Direction("sim-write", write_bytes_s)

    def read(
        self, source: Extent | FileRanges, buffer: Bytes, *, urgent: bool = False, on_done: OnMoved
    ) -> None:
        """Queue a read. An urgent one overtakes other reads that have not begun."""
        self._reads.put(
            _Job(self._disks.read, source, buffer, on_done, time.perf_counter_ns()), urgent
        )

    def write(
        self, extent: Extent, buffer: Bytes, *, changing: bool = False, on_done: OnMoved
    ) -> None:
        """Queue a write."""
        start = partial(self._disks.write, changing=changing)
        self._writes.put(_Job(start, extent, buffer, on_done, time.perf_counter_ns()))

    def close(self) -> None:
        """Finish the queued transfers and join both threads."""
        self._reads.close()
        self._writes.close()
