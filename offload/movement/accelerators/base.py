"""What the engine asks of a device: memory, copies that run by themselves, and events.

Work on a device runs on streams.  What one stream was given runs in order; between streams nothing
is ordered unless one waits for an event of the other.  Three implementations follow: ``cpu``, where
host memory is the device, ``sim``, which finds missing waits without a GPU, and ``streams``, which
is every device that torch has streams for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from ...facts.rates import Rates
from ...facts.trace import HostInstant, Instant

__all__ = [
    "ARENA_ALIGN",
    "Accelerator",
    "CopyDone",
    "Event",
    "Fill",
    "OnDone",
    "OverlapError",
    "aligned_bytes",
    "copied_bytes",
    "deliver",
    "halves",
]

log = logging.getLogger("overspill")

ARENA_ALIGN = 4096


class OverlapError(AssertionError):
    """Two streams touch the same device memory and nothing orders them: a wait is missing."""


class Event(Protocol):
    """A point in the work of one stream.  It tells that work is over, not that it went well."""

    def done(self) -> bool:
        """Whether the stream has passed the point; does not block."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread, without the GIL, until the stream has passed the point."""
        ...


@dataclass(frozen=True)
class CopyDone:
    """The end of one copy, on the clock of ``time.perf_counter_ns``."""

    started_ns: int
    finished_ns: int
    nbytes: int
    error: BaseException | None = None


OnDone = Callable[[CopyDone], None]
Fill = Callable[[torch.Tensor, torch.Tensor], None]  # of a slot, from a page


class InOrder:
    """Compute in the calling thread: what it is given is over at once.  See ``Accelerator``."""

    def stream(self) -> Hashable:
        return None

    def join(self, streams: Iterable[Hashable], memory: Iterable[torch.Tensor] = ()) -> None:
        return None

    def keep(self, memory: torch.Tensor) -> None:
        return None

    def allocated_bytes(self) -> tuple[int, int] | None:
        return None

    def instant(self) -> Instant:
        return HostInstant()


class Accelerator(Protocol):
    """One device.  Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """``"cpu"``, ``"sim"``, or what torch calls the device: ``"cuda:0"``."""
        ...

    @property
    def device(self) -> torch.device:
        """Where parameters appear; for ``sim`` the CPU."""
        ...

    @property
    def has_device_memory(self) -> bool:
        """Whether weights must be copied to be used.  If not, there is nothing to allocate."""
        ...

    @property
    def limits(self) -> Rates:
        """What a simulated machine is slowed down to; all ``None`` for a real one."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of device memory, 4096-aligned; its contents are arbitrary.

        The caller accounts for it, and gives it back with ``free``.
        """
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Gives back what ``allocate`` gave, whoever still has a view of it; also after ``close``.
        Nothing may be under way there."""
        ...

    def page_lock(self, address: int, nbytes: int) -> bool:
        """Lock host memory, until ``close``, so that copies run beside compute.

        Returns:
            Whether it is locked.  What the driver or a limit refuses stays pageable: copies of it
            are correct, but slower.  The first refusal is logged as a warning.
        """
        ...

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        """Starts a copy from host (``src``) to device (``dst``), both flat uint8 of one length.

        Copies of one direction run in the order of the calls, each after its ``after`` events.
        ``on_done`` is called once, on a thread of the accelerator, also if the copy fails; it must
        be cheap.

        Raises:
            ValueError: the tensors are not flat uint8 of one length in the right memories.
            OverlapError: ``sim`` only; ``after`` does not cover the last use of ``dst``.
        """
        ...

    def unpack(
        self, slot: torch.Tensor, page: torch.Tensor, fill: Fill, *, after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:  # fmt: skip
        """Has ``fill`` make weights in ``slot`` of a ``page``, behind the copies of ``copy_in``; to
        a device, a page in host memory is first copied to the slot's end.  ``fill`` is called with
        weights and page where compute has them, and does it or gives it the device to do; else as
        ``copy_in``."""
        ...

    def copy_out(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        """Starts a copy from device (``src``) to host (``dst``); else as ``copy_in``."""
        ...

    def lend(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor where compute has its tensors, for ``fetch``; freed with its last
        view, as any other."""
        ...

    def fetch(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        """As ``copy_in``, to what ``lend`` gave; also where the device is host memory."""
        ...

    def spill(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        """As ``copy_out``, from memory of compute's that the engine has not allocated, which is
        kept until the copy has ended."""
        ...

    def keep(self, memory: torch.Tensor) -> None:
        """Compute of the calling thread reads what ``lend`` gave, whoever lets go of it."""
        ...

    def record(self) -> Event:
        """The point up to which the calling thread's compute stream has been given work."""
        ...

    def stream(self) -> Hashable:
        """The stream that the calling thread's compute goes to, equal to itself alone; ``None``
        where there is but one order."""
        ...

    def join(self, streams: Iterable[Hashable], memory: Iterable[torch.Tensor] = ()) -> None:
        """Compute that the calling thread starts from now on comes after all that ``streams`` were
        given, and may read ``memory``, which they allocated, whoever lets go of it."""
        ...

    def instant(self) -> Instant:
        """When compute will have done what the calling thread's stream has been given."""
        ...

    def wait(self, event: Event) -> None:
        """Compute that the calling thread starts from now on comes after ``event``."""
        ...

    def used(self, memory: torch.Tensor) -> None:
        """Compute of the calling thread is about to read or write this device memory.

        Raises:
            OverlapError: ``sim`` only; compute has not waited for the last use of that memory.
        """
        ...

    def update_stream(self) -> AbstractContextManager[object]:
        """Within it, the calling thread's compute goes to the stream of optimizer updates."""
        ...

    def gather_stream(self) -> AbstractContextManager[object]:
        """Within it, the calling thread's compute goes to the stream of what ranks exchange."""
        ...

    def allocated_bytes(self) -> tuple[int, int] | None:
        """Of the device's memory, what the whole process has now, and the most that it had at once;
        ``None`` where nobody counts."""
        ...

    def synchronize(self) -> None:
        """Blocks until everything given to the device is over."""
        ...

    def close(self) -> None:
        """Lets copies end, joins threads and unlocks memory.  A second call does nothing."""
        ...


def copied_bytes(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Length of a copy between two flat uint8 tensors.

    Raises:
        ValueError: one is not flat, not contiguous or not uint8, or the lengths differ.
    """
    for name, memory in (("dst", dst), ("src", src)):
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(
                f"{name} must be flat contiguous uint8, got {memory.dtype} of shape "
                f"{tuple(memory.shape)}"
            )
    if dst.numel() != src.numel():
        raise ValueError(f"dst holds {dst.numel()} bytes, src {src.numel()}; they must be equal")
    return dst.numel()


def halves(slot: torch.Tensor, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a slot has room for: weights, and behind them a page."""
    size = page.numel()
    return slot.narrow(0, 0, slot.numel() - size), slot.narrow(0, slot.numel() - size, size)


def aligned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """``nbytes`` of new memory that start on a multiple of ``ARENA_ALIGN``, flat uint8."""
    memory = torch.empty(nbytes + ARENA_ALIGN, dtype=torch.uint8, device=device)
    return memory.narrow(0, -memory.data_ptr() % ARENA_ALIGN, nbytes)


def deliver(on_done: OnDone, copy: CopyDone) -> None:
    """Calls ``on_done``; what it raises is logged, since nobody stands above this thread."""
    try:
        on_done(copy)
    except BaseException:
        log.exception("what was to follow a copy of %d bytes raised", copy.nbytes)
