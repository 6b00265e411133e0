"""Vendor-specific parts of devices: registration of host memory, and options of events and streams.

This is the only file here that uses CUDA's names. All else goes through ``torch.accelerator`` and
the device's module, which are the same for all vendors. Kernels belong to ``optim``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

LOCK_REMEDY = (
    "raise the limit on locked memory (ulimit -l unlimited; docker run --ulimit memlock=-1; on "
    "WSL2, memory= in .wslconfig), or lower host_memory"
)


@dataclass(frozen=True)
class Vendor:
    """How devices of one kind (``torch.device.type``) are used.

    Attributes:
        register: page-locks ``(address, bytes)`` of host memory for a device. On failure it raises
            ``RuntimeError`` with the reason and leaves no error pending in the driver's library.
            ``None``: there is no such call, and copies use pageable memory, which is correct but
            slow.
        unregister: undoes ``register``, by address; also leaves no error pending.
        event_options: options for events of the device's module, besides ``enable_timing``.
        urgent: options for a stream whose short kernels run before queued kernels of compute.
        built: returns why this build of torch cannot use the device, or ``None``.
    """

    register: Callable[[int, int, torch.device], None] | None = None
    unregister: Callable[[int], None] | None = None
    event_options: Mapping[str, Any] = field(default_factory=dict)
    urgent: Mapping[str, Any] = field(default_factory=dict)
    built: Callable[[], str | None] = lambda: None


def _register_cuda(address: int, nbytes: int, device: torch.device) -> None:
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        result = runtime.cudaHostRegister(address, nbytes, 0)
        if result != runtime.cudaError.success:
            _clear_pending_cuda_error()
            raise RuntimeError(f"CUDA error {int(result)}")


def _unregister_cuda(address: int) -> None:
    runtime = torch.cuda.cudart()
    if runtime.cudaHostUnregister(address) != runtime.cudaError.success:
        _clear_pending_cuda_error()


def _clear_pending_cuda_error() -> None:
    """Clear the error that a failed runtime call left pending for this thread.

    ``cudaGetLastError`` clears it. PyTorch does not expose that function, but calls it after every
    kernel launch. Without this call, the user's next kernel would be reported as failed.
    """
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)


def _cuda_built() -> str | None:
    known = torch.version.cuda or torch.version.hip
    return None if known else "this PyTorch is built without CUDA"


# ROCm uses CUDA's names. Kinds that are not listed only have torch's generic interface.
VENDORS: dict[str, Vendor] = {
    "cuda": Vendor(
        register=_register_cuda,
        unregister=_unregister_cuda,
        event_options={"blocking": True},  # waiting threads sleep instead of spinning
        urgent={"priority": -1},
        built=_cuda_built,
    )
}
