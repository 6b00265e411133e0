"""``torch.testdev``: what torch asks of the module of a device."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

NAME = "testdev"


def register(native: ModuleType) -> ModuleType:
    """Makes ``torch.device("testdev")`` known to torch; once in a process."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return native


def _module(native: ModuleType) -> ModuleType:
    module: Any = ModuleType(f"torch.{NAME}")
    generator = native.default_generator()

    @contextmanager
    def device(_index: Any) -> Any:
        yield

    module.device = device
    module.is_available = lambda: True
    module.is_initialized, module._initialized = lambda: True, True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _index: None
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda _device=0: generator.get_state()
    module.set_rng_state = lambda state, _device=0: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_device_name = lambda _device=0: "test device"
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream
    module.synchronize = torch.accelerator.synchronize
    module.memory_allocated = torch.accelerator.memory_allocated
    module.max_memory_allocated = torch.accelerator.max_memory_allocated
    module.empty_cache = torch.accelerator.empty_cache
    return module
