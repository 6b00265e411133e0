"""The accelerator for ``device='cpu'``: weights are used in place, in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch

from ...errors import LifecycleError
from ...facts.rates import Rates
from ...io_engine.one_shot_event import OneShotEvent
from ...optim.activation_blocks import ActivationBlocks
from .base import Event, Fill, InOrder, OnDone, copied_bytes
from .lane import CopyJob, CopyLane


class _Passed:
    """An event of compute, which runs synchronously: it has always passed."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class _Copied:
    """The event that a copy sets at its end."""

    def __init__(self) -> None:
        self.passed = OneShotEvent()

    def done(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


class CpuAccelerator(InOrder):
    """Host memory as the device. See ``Accelerator``.

    The engine never asks it for device memory or copies of weights; such a call is a defect. It
    copies saved tensors between compute's memory and the buffers that disks use, and unpacks
    weights that are stored in another format.
    """

    name = "cpu"
    limits = Rates()
    has_device_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._lock = threading.Lock()
        self._lanes: dict[str, CopyLane] = {}  # made when first used
        self._closed = False

    def _refuse(self, what: str) -> NoReturn:
        raise AssertionError(
            f"device='cpu' has no memory of its own, but {what} was asked for: a defect of "
            "overspill; please report it"
        )

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse(f"an arena of {nbytes} bytes")

    def free(self, memory: torch.Tensor) -> None:
        self._refuse("to free an arena")

    def page_lock(self, address: int, nbytes: int) -> bool:
        return True

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._refuse("a copy in")

    def unpack(
        self, slot: torch.Tensor, page: torch.Tensor, fill: Fill, *, after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:  # fmt: skip
        return self._put("copy_in", page, page, after, on_done, lambda: fill(slot, page))

    def copy_out(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._refuse("a copy out")

    def lend(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def fetch(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        if blocks is not None:
            return self._put("copy_in", src, src, after, on_done, lambda: blocks.unpack(src, dst))
        return self._copy("copy_in", dst, src, after, on_done)

    def spill(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone,
        blocks: ActivationBlocks | None = None,
    ) -> Event:  # fmt: skip
        if blocks is not None:
            return self._put("copy_out", dst, dst, after, on_done, lambda: blocks.pack(src, dst))
        return self._copy("copy_out", dst, src, after, on_done)

    def _copy(
        self, name: str, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Event],
        on_done: OnDone,
    ) -> Event:  # fmt: skip
        copied_bytes(dst, src)
        return self._put(name, dst, src, after, on_done)

    def _put(
        self, name: str, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Event],
        on_done: OnDone, do: Callable[[], None] | None = None,
    ) -> Event:  # fmt: skip
        event = _Copied()
        with self._lock:
            if self._closed:
                raise LifecycleError("the accelerator 'cpu' is closed")
            if name not in self._lanes:
                self._lanes[name] = CopyLane(name, None, 0.0, None)
            now_ns = time.perf_counter_ns()
            self._lanes[name].put(CopyJob(dst, src, after, now_ns, event.passed.set, on_done, do))
        return event

    def record(self) -> Event:
        return _Passed()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def used(self, memory: torch.Tensor) -> None:
        return None

    def update_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def gather_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        with self._lock:
            self._closed, lanes = True, list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()
