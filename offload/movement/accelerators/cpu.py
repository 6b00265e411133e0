"""The device is host memory: weights are used in place and nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch

from ...facts.rates import Rates
from .base import Event, InOrder, OnDone


class _Passed:
    """An event of a stream that runs everything at once."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuAccelerator(InOrder):
    """See ``Accelerator``.  Asking it for device memory or a copy is a bug of the engine."""

    name = "cpu"
    limits = Rates()
    has_device_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def _refuse(self, what: str) -> NoReturn:
        raise AssertionError(
            f"device='cpu' has no memory of its own, but {what} was asked for: a defect of "
            "overspill; please report it"
        )

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse(f"an arena of {nbytes} bytes")

    def free(self, memory: torch.Tensor) -> None:
        self._refuse("to free an arena")

    def page_lock(self, address: int, nbytes: int) -> None:
        return None

    def copy_in(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._refuse("a copy in")

    def copy_out(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: Sequence[Event], on_done: OnDone
    ) -> Event:
        self._refuse("a copy out")

    def record(self) -> Event:
        return _Passed()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def used(self, memory: torch.Tensor) -> None:
        return None

    def update_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None
