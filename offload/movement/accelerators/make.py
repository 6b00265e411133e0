"""Creation of an accelerator by name, and the names of its protocol."""

from __future__ import annotations

import torch

from ...errors import DeviceError
from ...facts.rates import Rates
from .base import Accelerator, CopyDone, Event, OnDone, OverlapError
from .cpu import CpuAccelerator
from .sim import SimAccelerator
from .streams import StreamsAccelerator
from .vendors import VENDORS, Vendor

__all__ = ["Accelerator", "CopyDone", "Event", "OnDone", "OverlapError", "make_accelerator"]


def make_accelerator(device: str | torch.device | None, rates: Rates | None) -> Accelerator:
    """Create the accelerator called ``device``; the caller closes it.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, another of torch's accelerators such as ``"xpu"``,
            ``"cpu"`` or ``"sim"``. ``None`` selects the current accelerator if there is one, else
            the CPU.
        rates: the limits of ``"sim"``; other devices ignore them.

    Raises:
        ValueError: the kind of device is unknown.
        OffloadError: this machine does not have the device.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = "cpu" if present is None else present.type
    kind, _, index = str(device).partition(":")
    if kind == "sim" and not index:
        return SimAccelerator(rates)
    known = {*VENDORS, "xpu", *([present.type] if present else [])}
    if kind not in ("cpu", *known) or (index and not index.isdecimal()):
        raise ValueError(
            "device must be an accelerator of torch's such as 'cuda' or 'cuda:<i>', 'cpu' or "
            f"'sim', got {str(device)!r}"
        )
    if kind == "cpu":
        return CpuAccelerator()
    return StreamsAccelerator(_numbered(kind, index, present))


def _numbered(kind: str, index: str, present: torch.device | None) -> torch.device:
    """Return the device of this kind and number; raise ``OffloadError`` if it does not exist."""
    count = torch.accelerator.device_count() if present and present.type == kind else 0
    if count == 0:
        built = VENDORS.get(kind, Vendor()).built()
        why = f"no {kind.upper()} device is visible" if built is None else built
        raise DeviceError(f"device {kind!r}: {why}; use device='cpu', or 'sim' to try offloading")
    number = int(index) if index else torch.accelerator.current_device_index()
    if number >= count:
        raise DeviceError(
            f"device '{kind}:{number}' was asked for; {count} {kind.upper()} devices are visible, "
            f"the last is '{kind}:{count - 1}'"
        )
    return torch.device(kind, number)
