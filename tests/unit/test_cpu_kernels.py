"""The first step of ``overspill train`` is as precise as later ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from overspill.train.cpu_kernels import choose_cpu_kernels


class Calls(TorchFunctionMode):
    """The functions that are called, by dtype, with the size of what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self.sizes[func.__name__, args[0].dtype] = args[0].numel()
        return func(*args, **(kwargs or {}))


def test_each_function_of_mkl_is_called_first_by_one_thread() -> None:
    choose_cpu_kernels.cache_clear()
    with Calls() as calls:
        choose_cpu_kernels()
    for name in ("tanh", "exp", "erf", "sqrt", "sin", "cos", "log"):
        for dtype in (torch.float32, torch.float64):
            assert 16 <= calls.sizes[name, dtype] < 1 << 15  # torch's smallest part of a thread
