"""The kernels of torch's elementwise functions on the CPU, which MKL chooses."""

from __future__ import annotations

import functools

import torch

# The functions that MKL computes on the CPU for tensors without gaps (aten/src/ATen/cpu/vml.h).
_OF_MKL = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log",
    "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip


@functools.cache
def choose_cpu_kernels() -> None:
    """Let MKL choose its kernel of each function on this thread alone.

    It does so in the first call of each. If several threads make that call, one of them may compute
    its part with a kernel of low precision (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        few = torch.full((64,), 0.5, dtype=dtype, device="cpu")  # too few for several threads
        for name in _OF_MKL:
            getattr(torch, name)(few)
