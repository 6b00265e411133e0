"""What each vendor's devices have of their own: registration of host memory, and kinds of events.

The only file here that knows CUDA's names.  Everything else goes through ``torch.accelerator`` and
the device's module, which is the same for all; kernels are ``optim``'s.
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
        register: page-locks ``(address, bytes)`` of host memory for a device, or raises
            ``RuntimeError`` with the reason and leaves no error pending in the driver's library.
            ``None``: there is no way; copies then are those of pageable memory, right and slow.
        unregister: undoes it, by address; leaves no error pending either.
        event_options: for the events of the device's module, beside ``enable_timing``.
        urgent: for a stream whose short kernels go before compute's that have not begun.
        built: why torch knows no such device although it may be there, or ``None``.
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
    """Clear the error that a failed call of the runtime has left for this thread.

    ``cudaGetLastError`` does it, which PyTorch does not expose but calls after every kernel launch:
    without this, the next kernel of the user would be reported as failed.
    """
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)


def _cuda_built() -> str | None:
    known = torch.version.cuda or torch.version.hip
    return None if known else "this PyTorch is built without CUDA"


# ROCm answers to CUDA's names.  Of kinds that are not here, torch's own interface is all there is.
VENDORS: dict[str, Vendor] = {
    "cuda": Vendor(
        register=_register_cuda,
        unregister=_unregister_cuda,
        event_options={"blocking": True},  # whoever waits sleeps, and does not spin
        urgent={"priority": -1},
        built=_cuda_built,
    )
}
