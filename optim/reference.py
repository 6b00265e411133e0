"""Runs a rule's formula in plain torch, one rounding an operation: the oracle of every parity test.

It also serves device tensors, and the CPU where the extension was not built.  In formulas no
``lerp``, ``addcmul`` or ``addcdiv``: they may round once where two operations round twice, and not
alike on every device.  Nor is a tensor divided by a number, which some devices turn into a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import compact
from .formats import BLOCK, UNSIGNED_MOMENTS, join_master, round_to_upper, scale_name, split_master
from .kernels import check_job

CPU_SLICE = 2**16
DEVICE_SLICE = 2**20
LARGEST = torch.finfo(torch.float32).max

# Changes the fp32 values of the gradient (scaled already), the weight and each moment in place, by
# a rule's coefficients.
Formula = Callable[[Tensor, Tensor, list[Tensor], Sequence[float]], None]


def root(value: Tensor) -> Tensor:
    """The correctly rounded fp32 square root: torch's own for fp32 may be one unit off.

    A root in double, rounded once more, is never on the wrong side of a midpoint of two floats.
    """
    return value.double().sqrt_().float()


def add_l2(g: Tensor, w: Tensor, l2: float) -> None:
    """Weight decay as torch's older optimizers have it: to the gradient."""
    if l2 != 0.0:
        g.add_(w * l2)


def read_weight(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The fp32 value of a weight and its master, as a new tensor."""
    if "master_lo" in state:
        return join_master(weight, state["master_lo"])
    return state.get("master", weight).to(torch.float32, copy=True)


def write_weight(value: Tensor, weight: Tensor, state: Mapping[str, Tensor]) -> None:
    """Stores an fp32 value as a weight and its master."""
    if "master_lo" in state:
        upper, lower = split_master(value)
        weight.copy_(upper)
        state["master_lo"].copy_(lower)
        return
    if "master" in state:
        state["master"].copy_(value)
        if weight.dtype is torch.bfloat16:
            value = round_to_upper(value)
    weight.copy_(value)


def read_moment(state: Mapping[str, Tensor], name: str) -> Tensor:
    """The fp32 value of a moment in any format, as a new tensor."""
    stored = state[name]
    if stored.dtype is torch.uint8:
        kind = compact.UNSIGNED if name in UNSIGNED_MOMENTS else compact.SIGNED
        return compact.from_int8(stored, state[scale_name(name)], kind)
    return stored.to(torch.float32, copy=True)


def write_moment(
    value: Tensor, state: Mapping[str, Tensor], name: str, noise: compact.Noise
) -> None:
    """Stores an fp32 moment in its format; compact ones round by ``noise``, slice by slice."""
    stored = state[name]
    if stored.dtype is torch.float32:
        stored.copy_(value)
        return
    for begin in range(0, value.numel(), DEVICE_SLICE):
        span = slice(begin, begin + DEVICE_SLICE)
        here = replace(noise, position=noise.position + begin)
        if stored.dtype is torch.bfloat16:
            stored[span].copy_(compact.to_bf16(value[span], here))
            continue
        kind = compact.UNSIGNED if name in UNSIGNED_MOMENTS else compact.SIGNED
        codes, scale = compact.to_int8(value[span], here, kind)
        stored[span].copy_(codes)
        state[scale_name(name)][begin // BLOCK : -(-(begin + codes.numel()) // BLOCK)] = scale


def load_moment(
    value: Tensor, state: Mapping[str, Tensor], name: str, noise: compact.Noise
) -> None:
    """Do as ``write_moment``, for a value from outside.

    A value that ``read_moment`` has returned is stored exactly as it was, so that training
    continues as if the state had not been exported.
    """
    write_moment(value, state, name, noise)
    stored = state[name]
    if stored.dtype is not torch.uint8:
        return
    kind = compact.UNSIGNED if name in UNSIGNED_MOMENTS else compact.SIGNED
    for begin in range(0, value.numel(), DEVICE_SLICE):
        part = stored[begin : begin + DEVICE_SLICE]
        found, codes, scale = compact.as_it_was(value[begin : begin + DEVICE_SLICE], kind)
        elements = found.repeat_interleave(BLOCK)[: part.numel()]
        part.copy_(torch.where(elements, codes, part))
        scales = state[scale_name(name)][begin // BLOCK :][: found.numel()]
        scales.copy_(torch.where(found, scale, scales))


def _update_slice(
    formula: Formula,
    grad: Tensor,
    weight: Tensor,
    state: Mapping[str, Tensor],
    moments: Sequence[str],
    coefficients: Sequence[float],
    noise_key: int,
    position: int,
) -> Tensor:
    g = grad.to(torch.float32, copy=True).mul_(coefficients[0])
    w = read_weight(weight, state)
    values = [read_moment(state, name) for name in moments]
    formula(g, w, values, coefficients)
    write_weight(w, weight, state)
    finite = torch.isfinite(weight).all()
    if not moments:
        return finite
    for k, (name, value) in enumerate(zip(moments, values, strict=True)):
        write_moment(value, state, name, compact.Noise(position, k, noise_key))
        compactly = state[name].dtype is torch.bfloat16
        # Beyond the largest bf16 the noise decides whether it becomes infinite: count it as such.
        limit = compact.LARGEST_BF16 if compactly else LARGEST
        finite = finite & (value.abs() <= limit).all()
    return finite


def update(
    formula: Formula,
    grad: Tensor,
    weight: Tensor,
    state: Mapping[str, Tensor],
    moments: Sequence[str],
    coefficients: Sequence[float],
    noise_key: int,
    position: int,
) -> bool:
    """The same as ``kernels.update``, on any device, slice by slice to bound its temporaries."""
    check_job(grad, weight, state, moments, position)
    numel = weight.numel()
    step = CPU_SLICE if weight.device.type == "cpu" else DEVICE_SLICE
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    for begin in range(0, numel, step):
        end = min(begin + step, numel)
        part = {
            name: tensor[begin // BLOCK : -(-end // BLOCK)]
            if name.endswith("_scale")
            else tensor[begin:end]
            for name, tensor in state.items()
        }
        finite = finite & _update_slice(
            formula,
            grad[begin:end],
            weight[begin:end],
            part,
            moments,
            coefficients,
            noise_key,
            position + begin,
        )
    return bool(finite)
