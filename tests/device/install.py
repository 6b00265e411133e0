"""Makes the test device a device of torch's and of overspill's, in this process."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from overspill.movement.accelerators.vendors import VENDORS, Vendor

from .build import build
from .module import NAME, register


@cache
def install() -> ModuleType:
    """The native module; ``torch.device("testdev")`` works from now on."""
    native: ModuleType = register(build())

    def page_lock(address: int, nbytes: int, _device: torch.device) -> None:
        native.register_host(address, nbytes)

    VENDORS[NAME] = Vendor(register=page_lock, unregister=native.unregister_host)
    return native
