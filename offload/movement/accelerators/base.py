"""The interface between the engine and a device: memory, asynchronous copies and events.

Device work runs on streams. Work on one stream runs in order. Work on different streams is
unordered unless one stream waits for an event of the other.

There are three implementations. ``cpu`` uses host memory as the device. ``sim`` finds missing waits
without a GPU. ``streams`` supports every device that torch has streams for.
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
from ...optim.activation_blocks import ActivationBlocks

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
    """Unordered accesses of two streams to the same device memory: a wait is missing."""


class Event(Protocol):
    """A point in the work of one stream. It signals completion, not success."""

    def done(self) -> bool:
        """Return whether the stream has passed the point; does not block."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until the stream has passed the point."""
        ...


@dataclass(frozen=True)
class CopyDone:
    """The end of one copy; times are those of ``time.perf_counter_ns``."""

    started_ns: int
    finished_ns: int
    nbytes: int
    error: BaseException | None = None


OnDone = Callable[[CopyDone], None]
Fill = Callable[[torch.Tensor, torch.Tensor], None]  # fills a slot (first) from a page (second)


class InOrder:
    """Base of accelerators whose compute runs synchronously in the calling thread.

    See ``Accelerator`` for the methods.
    """

    def stream(self) -> Hashable:
        return None

    def join(self, streams: Iterable[Hashable], memory: Iterable[torch.Tensor] = ()) -> None:
        return None

    def keep(self, memory: torch.Tensor) -> None:
        return None

    def allocated_bytes(self) -> tuple[int, int] | None:
        return None

    def empty_cache(self) -> None:
        return None

    def page_unlock(self, address: int, nbytes: int) -> None:
        return None

    def stage(self, nbytes: int) -> None:
        return None

    def instant(self) -> Instant:
        return HostInstant()


class Accelerator(Protocol):
    """One device. All methods are thread-safe."""

    @property
    def name(self) -> str:
        """``"cpu"``, ``"sim"``, or torch's name of the device, such as ``"cuda:0"``."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU for ``sim``."""
        ...

    @property
    def has_device_memory(self) -> bool:
        """Whether weights must be copied before use. If not, no device memory is allocated."""
        ...

    @property
    def limits(self) -> Rates:
        """The rates of a simulated machine; all ``None`` for a real one."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory: a flat uint8 tensor, 4096-aligned, with arbitrary contents.

        The caller accounts for it and returns it with ``free``.
        """
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Free memory from ``allocate``, even if views of it still exist.

        This also works after ``close``. No work may be in progress on the memory.
        """
        ...

    def page_lock(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory, so that its copies overlap with compute.

        It stays locked until ``page_unlock`` or ``close``.

        Returns:
            Whether it is locked. Memory that the driver or a limit refuses to lock stays pageable:
                its copies are correct but slower. The first refusal is logged as a warning.
        """
        ...

    def page_unlock(self, address: int, nbytes: int) -> None:
        """Undo ``page_lock`` for what was locked between ``address`` and ``address + nbytes``.

        No copy of it may be in progress.
        """
        ...

    def empty_cache(self) -> None:
        """Free the unused memory that PyTorch's caching allocator holds on the device."""
        ...

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        """Start a copy from host (``src``) to device (``dst``), both flat uint8 of one length.

        Copies of one direction run in the order of the calls, each after its ``after`` events.
        ``on_done`` is called once, on a thread of the accelerator, even if the copy fails. It must
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
        """Call ``fill`` to unpack a ``page`` into weights in ``slot``, in order with ``copy_in``.

        If the accelerator has device memory, a page in host memory is first copied to the end of
        the slot. ``fill`` receives the weights and the page in compute's memory. It does the work
        or enqueues it on the device. Events and errors are as for ``copy_in``.
        """
        ...

    def copy_out(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        """Start a copy from device (``src``) to host (``dst``); otherwise as ``copy_in``."""
        ...

    def lend(self, nbytes: int) -> torch.Tensor:
        """Allocate a destination for ``fetch``: flat uint8, in the memory that compute uses.

        It is an ordinary tensor, freed with its last view.
        """
        ...

    def fetch(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        """Copy as ``copy_in``, into memory from ``lend``; also if the device is host memory.

        With ``blocks``, ``src`` is packed, and is unpacked where compute's memory is.
        """
        ...

    def spill(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        """Copy as ``copy_out``, from compute's memory that the engine did not allocate.

        The memory is kept alive until the copy ends.  With ``blocks``, it is packed where it is,
        and ``dst`` receives the packed bytes.
        """
        ...

    def stage(self, nbytes: int) -> None:
        """Allocate ``nbytes`` of the device's memory for each direction, to pack and unpack in.

        ``spill`` and ``fetch`` with ``blocks`` need it where the device has memory of its own.  0
        frees it.
        """
        ...

    def keep(self, memory: torch.Tensor) -> None:
        """Let the calling thread's compute read ``memory`` that belongs to another stream, such as
        memory that ``lend`` returned.

        After its last view is dropped, the memory is reused only once the work that this compute
        had enqueued by then is over.
        """
        ...

    def record(self) -> Event:
        """Return the point up to which work was enqueued on the calling thread's compute stream."""
        ...

    def stream(self) -> Hashable:
        """Return the calling thread's compute stream; it compares equal only to itself.

        ``None`` if the device has a single order of execution.
        """
        ...

    def join(self, streams: Iterable[Hashable], memory: Iterable[torch.Tensor] = ()) -> None:
        """Order the calling thread's later compute after all work enqueued on ``streams``.

        That compute may read ``memory``, which those streams allocated, even after its other users
        have dropped it.
        """
        ...

    def instant(self) -> Instant:
        """Return the instant at which compute finishes the work enqueued so far.

        This is the work that the calling thread's compute stream has been given.
        """
        ...

    def wait(self, event: Event) -> None:
        """Order the calling thread's later compute after ``event``."""
        ...

    def used(self, memory: torch.Tensor) -> None:
        """Declare that the calling thread's compute is about to read or write this device memory.

        Raises:
            OverlapError: ``sim`` only; compute has not waited for the last use of that memory.
        """
        ...

    def update_stream(self) -> AbstractContextManager[object]:
        """Return a context in which compute runs on the stream of optimizer updates."""
        ...

    def gather_stream(self) -> AbstractContextManager[object]:
        """Return a context in which compute runs on the stream for exchange between ranks."""
        ...

    def allocated_bytes(self) -> tuple[int, int] | None:
        """Return the device memory of the whole process: (current, peak) bytes.

        ``None`` if the device keeps no such statistics.
        """
        ...

    def synchronize(self) -> None:
        """Block until all work given to the device is over."""
        ...

    def close(self) -> None:
        """Finish queued copies, join threads and unlock memory. A second call does nothing."""
        ...


def copied_bytes(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Return the length of a copy between two flat uint8 tensors.

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
    """Split a slot into the room for its weights and, behind it, the room for a page."""
    size = page.numel()
    return slot.narrow(0, 0, slot.numel() - size), slot.narrow(0, slot.numel() - size, size)


def aligned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate ``nbytes`` as flat uint8 whose address is a multiple of ``ARENA_ALIGN``."""
    memory = torch.empty(nbytes + ARENA_ALIGN, dtype=torch.uint8, device=device)
    return memory.narrow(0, -memory.data_ptr() % ARENA_ALIGN, nbytes)


def deliver(on_done: OnDone, copy: CopyDone) -> None:
    """Call ``on_done``; log what it raises, since this thread has no caller to raise it to."""
    try:
        on_done(copy)
    except BaseException:
        log.exception("what was to follow a copy of %d bytes raised", copy.nbytes)
