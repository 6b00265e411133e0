"""The accelerator of a run: the protocol's names, and the choice by name."""

from __future__ import annotations

import torch

from ..errors import OffloadError
from ..observe.rates import Rates
from .accelerators.base import Accelerator, CopyDone, Event, OnDone, OverlapError
from .accelerators.cpu import CpuAccelerator
from .accelerators.cuda import CudaAccelerator
from .accelerators.sim import SimAccelerator

__all__ = ["Accelerator", "CopyDone", "Event", "OnDone", "OverlapError", "make_accelerator"]


def make_accelerator(device: str | torch.device | None, rates: Rates | None) -> Accelerator:
    """The accelerator called ``device``: ``"cuda"``, ``"cuda:1"``, ``"cpu"`` or ``"sim"``.

    ``None`` takes the current CUDA device where there is one, else the CPU.  ``rates`` limit
    ``"sim"`` and mean nothing to the others.  The caller closes it.

    Raises:
        ValueError: no such kind of device.
        OffloadError: the device is not on this machine.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "cpu", "sim") or (index and (kind == "sim" or not index.isdecimal())):
        raise ValueError(f"device must be 'cuda', 'cuda:<i>', 'cpu' or 'sim', got {str(device)!r}")
    if kind == "cpu":
        return CpuAccelerator()
    if kind == "sim":
        return SimAccelerator(rates)
    return CudaAccelerator(_cuda_device(index))


def _cuda_device(index: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        built = torch.version.cuda
        why = "this PyTorch is built without CUDA" if built is None else "no CUDA device is visible"
        raise OffloadError(f"device 'cuda': {why}; use device='cpu', or 'sim' to try offloading")
    number = int(index) if index else torch.cuda.current_device()
    if number >= count:
        raise OffloadError(
            f"device 'cuda:{number}' was asked for; {count} CUDA devices are visible, the last is "
            f"'cuda:{count - 1}'"
        )
    return torch.device("cuda", number)
