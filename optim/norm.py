"""Sums over gradients: the square of their norm, and accumulation in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """``sums_of_squares`` of one."""
    return sums_of_squares([grad])[0]


def sums_of_squares(grads: Sequence[Tensor]) -> list[float]:
    """Return the sums of squares of flat tensors of one dtype (fp32, bf16 or fp16), in double.

    Deterministic: it depends neither on the number of threads nor on the instruction set.  Not
    finite if an element is not.  On a device it is a reduction in double there.
    """
    for grad in grads:
        _check("gradient", grad)
    if any(grad.dtype is not grads[0].dtype for grad in grads):
        raise ValueError("gradients are summed together in one dtype only")
    if all(grad.device.type == "cpu" for grad in grads):
        if kernels.NATIVE is None or not grads:
            return [_sum_in_torch(grad) for grad in grads]
        sums: list[float] = kernels.NATIVE.sums_of_squares(
            [grad.data_ptr() for grad in grads], [grad.numel() for grad in grads],
            FLOAT_TYPES[grads[0].dtype],
        )  # fmt: skip
        return sums
    return [_sum_on_device(grad) for grad in grads]


def _sum_on_device(grad: Tensor) -> float:
    slices = (grad[begin : begin + SLICE] for begin in range(0, grad.numel(), SLICE))
    return float(sum((part.double().square().sum() for part in slices), 0.0))


def accumulate(total: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to ``total``: flat tensors of the same length, ``total`` in fp32."""
    _check("gradient", grad)
    check_flat("total", total, grad.numel())
    if total.dtype is not torch.float32:
        raise ValueError(f"gradients accumulate in float32, not {total.dtype}")
    if kernels.NATIVE is not None and grad.device == total.device == torch.device("cpu"):
        kernels.NATIVE.accumulate(
            total.data_ptr(), grad.data_ptr(), FLOAT_TYPES[grad.dtype], grad.numel()
        )
    else:
        total.add_(grad)
