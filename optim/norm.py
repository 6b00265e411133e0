"""Sums over gradients: the square of their norm, and accumulation in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import kernels
from .kernels import FLOAT_TYPES, check_flat

TASK = 16384
SUMS = 16
SLICE = 2**22


def _check(name: str, tensor: Tensor) -> None:
    check_flat(name, tensor, tensor.numel())
    if tensor.dtype not in FLOAT_TYPES:
        raise ValueError(f"{name} of {tensor.dtype} has no kernel; use one of {list(FLOAT_TYPES)}")


def _sum_in_torch(grad: Tensor) -> float:
    """The kernel's own order: sixteen running sums per task, folded; tasks added in order."""
    parts: list[float] = []
    for begin in range(0, grad.numel(), TASK):
        part = grad[begin : begin + TASK].to(torch.float64)
        rows = torch.nn.functional.pad(part, (0, -part.numel() % SUMS)).view(-1, SUMS)
        running = (rows * rows).cumsum(0)[-1].tolist()
        while len(running) > 1:
            half = len(running) // 2
            running = [a + b for a, b in zip(running[:half], running[half:], strict=True)]
        parts.append(running[0])
    return _compensated(parts)


def _compensated(parts: list[float]) -> float:
    total = lost = 0.0
    for part in parts:
        following = total + part
        lost += (total - following) + part if total >= part else (part - following) + total
        total = following
    return total + lost if math.isfinite(lost) else total


def sum_of_squares(grad: Tensor) -> float:
    """The sum of the squares of a flat fp32, bf16 or fp16 tensor, in double precision.

    Deterministic, whatever the number of threads and the instruction set.  Not finite if an
    element is not.  On a device it is a reduction in double there.
    """
    _check("gradient", grad)
    if kernels.NATIVE is not None and grad.device.type == "cpu":
        return float(
            kernels.NATIVE.sum_of_squares(grad.data_ptr(), FLOAT_TYPES[grad.dtype], grad.numel())
        )
    if grad.device.type == "cpu":
        return _sum_in_torch(grad)
    slices = (grad[begin : begin + SLICE] for begin in range(0, grad.numel(), SLICE))
    return float(sum((part.double().square().sum() for part in slices), 0.0))


def accumulate(total: Tensor, grad: Tensor) -> None:
    """``total += grad``: flat tensors of one length, ``total`` in fp32."""
    _check("gradient", grad)
    check_flat("total", total, grad.numel())
    if total.dtype is not torch.float32:
        raise ValueError(f"gradients accumulate in float32, not {total.dtype}")
    if kernels.serves(total) and kernels.NATIVE is not None and grad.device == total.device:
        kernels.NATIVE.accumulate(
            total.data_ptr(), grad.data_ptr(), FLOAT_TYPES[grad.dtype], grad.numel()
        )
    else:
        total.add_(grad)
