"""The protocol behind which bytes are moved, and the choice of who does it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .native import NATIVE

# Measured on a virtual NVMe disk: against 1 MiB x 32, up to 9 % faster and a fifth less CPU by
# io_uring; 8-12 % faster and half the CPU by threads.  What is in flight is what an urgent request
# has to wait for: 48 MiB at most.
DEFAULT_BLOCK_BYTES = 4 << 20
DEPTHS = {"uring": 12, "threads": 4, "aiofiles": 4}

LATENCY_STEPS = 160

log = logging.getLogger("overspill.io_engine")


class Outcome(enum.IntEnum):
    """How a request ended; the values are those of csrc/io/request.h."""

    DONE = 0
    FAILED = 1
    CORRUPT = 2
    CANCELLED = 3
    TRUNCATED = 4


class Completion(NamedTuple):
    """A request's end.  From ``lane`` on, it describes the first block that failed."""

    id: int
    outcome: int
    error: int
    lane: int
    offset: int
    nbytes: int
    expected: int
    found: int
    started_ns: int
    finished_ns: int


class LaneCounts(NamedTuple):
    """Counters of one lane; bytes include failed and repeated transfers."""

    bytes_read: int
    bytes_written: int
    blocks_read: int
    blocks_written: int
    retries: int
    busy_ns: int
    in_flight: int
    queued: int


class Segment(NamedTuple):
    """A run of one file that a request moves; ``checksums``: address of a uint32 a block, or 0.

    ``changing``: of a write, others may write to the memory meanwhile; of each block a copy is
    summed and written.
    """

    lane: int
    offset: int
    address: int
    nbytes: int
    checksums: int
    changing: bool = False


class Backend(Protocol):
    """Moves requests, block by block, and judges every result; knows no tickets and no extents."""

    name: str

    def submit(self, id: int, write: bool, urgent: bool, segments: Sequence[Segment]) -> None:
        """Queues a request.  Its memory must stay until its completion has been collected."""

    def cancel(self, id: int) -> bool:
        """Takes a request back if nothing of it has started; it completes as ``CANCELLED``."""

    def promote(self, id: int) -> None:
        """Makes the rest of a request urgent."""

    def collect(self, timeout_s: float) -> list[Completion]:
        """The requests that have ended; waits for one up to ``timeout_s``.  For one thread."""

    def wake(self) -> None:
        """Ends the current or the next wait in ``collect``."""

    def add_memory(self, address: int, nbytes: int) -> None:
        """Announce memory for many transfers, until ``drop_memory`` has returned."""

    def drop_memory(self, address: int, nbytes: int) -> None:
        """Takes the hint back; to be called before the memory is unmapped.  From any thread."""

    def stats(self) -> list[LaneCounts]:
        """Counters, a lane each."""

    def latencies(self) -> list[int]:
        """How many transfers took how long: step k counts those of 2**(k/4) ns and more."""

    def close(self, timeout_s: float) -> bool:
        """Ends what is queued, then all threads.  False: some are stuck, and were left behind."""


@dataclass(frozen=True)
class Tuning:
    """How bytes are moved: who does it, in blocks of what size, how many at a time a directory."""

    backend: str
    block_bytes: int
    queue_depth: int


BackendFactory = Callable[[Sequence[int], Tuning], Backend]
"""Starts a backend over open files (descriptors); for disks that are simulated."""


class NativeBackend:
    """A backend in C++, over a core that has been started."""

    def __init__(self, name: str, core: Any) -> None:
        self.name, self._core = name, core

    @classmethod
    def start(cls, fds: Sequence[int], tuning: Tuning) -> NativeBackend:
        """``uring`` or ``threads``, as the setting says."""
        assert NATIVE is not None
        core = NATIVE.Core(list(fds), tuning.backend, tuning.block_bytes, tuning.queue_depth)
        return cls(tuning.backend, core)

    def submit(self, id: int, write: bool, urgent: bool, segments: Sequence[Segment]) -> None:
        self._core.submit(id, write, urgent, segments)

    def cancel(self, id: int) -> bool:
        return bool(self._core.cancel(id))

    def promote(self, id: int) -> None:
        self._core.promote(id)

    def collect(self, timeout_s: float) -> list[Completion]:
        return [Completion(*ended) for ended in self._core.collect(timeout_s)]

    def wake(self) -> None:
        self._core.wake()

    def add_memory(self, address: int, nbytes: int) -> None:
        self._core.add_memory(address, nbytes)

    def drop_memory(self, address: int, nbytes: int) -> None:
        self._core.drop_memory(address, nbytes)

    @property
    def registered_bytes(self) -> int:
        """Memory whose transfers spare the kernel the pinning of pages, all lanes together."""
        return int(self._core.registered_bytes())

    def stats(self) -> list[LaneCounts]:
        return [LaneCounts(*lane) for lane in self._core.stats()]

    def latencies(self) -> list[int]:
        return list(self._core.latencies())

    def close(self, timeout_s: float) -> bool:
        return bool(self._core.close(timeout_s))


def choose(wish: str) -> tuple[str, str]:
    """The backend to use for ``wish``, and why.

    Raises:
        ValueError: ``wish`` is unknown.
        RuntimeError: it cannot run here; the message says why, and what can.
    """
    if wish not in ("auto", *DEPTHS):
        raise ValueError(f"backend must be 'auto', 'uring', 'threads' or 'aiofiles', not {wish!r}")
    if wish == "aiofiles":
        return wish, "asked for"
    if NATIVE is None:
        if wish == "auto":
            return "aiofiles", "the native extension is not there"
        raise RuntimeError(
            f"backend {wish!r} needs the native extension, which is not there; install with a C++ "
            "compiler, unset OVERSPILL_NATIVE, or use backend='aiofiles'"
        )
    if wish == "threads":
        return wish, "asked for"
    refusal = NATIVE.uring_refusal()
    if not refusal:
        return "uring", "io_uring works here" if wish == "auto" else "asked for"
    if wish == "auto":
        return "threads", f"no io_uring here ({refusal})"
    raise RuntimeError(f"backend 'uring' cannot run here ({refusal}); use 'threads' or 'auto'")
