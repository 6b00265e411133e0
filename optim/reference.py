"""The rules in plain torch, one rounding an operation: the oracle of every parity test.

It also serves device tensors, and the CPU where the extension was not built.  No ``lerp``,
``addcmul`` or ``addcdiv``: they may round once where two operations round twice, and not alike on
every device.  Nor is a tensor divided by a number, which some devices turn into a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import compact
from .formats import BLOCK, join_master, round_to_upper, scale_name, split_master
from .kernels import check_job

CPU_SLICE = 2**16
DEVICE_SLICE = 2**20
LARGEST = torch.finfo(torch.float32).max
UNSIGNED_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})

Formula = Callable[[Tensor, Tensor, list[Tensor], Sequence[float]], None]


def _root(value: Tensor) -> Tensor:
    """The correctly rounded fp32 square root: torch's own for fp32 may be one unit off.

    A root in double, rounded once more, is never on the wrong side of a midpoint of two floats.
    """
    return value.double().sqrt_().float()


def _add_l2(g: Tensor, w: Tensor, l2: float) -> None:
    if l2 != 0.0:
        g.add_(w * l2)


def _adam_moments(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, decay, l2, take1, keep2, take2, *_ = c
    _add_l2(g, w, l2)
    w.mul_(decay)
    m[0].add_((g - m[0]) * take1)
    m[1].mul_(keep2).add_((g * take2) * g)


def _adam(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    root_scale, eps, step_size = c[6:9]
    _adam_moments(g, w, m, c)
    w.sub_((m[0] * step_size) / (_root(m[1]) * root_scale + eps))


def _amsgrad(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    root_scale, eps, step_size = c[6:9]
    _adam_moments(g, w, m, c)
    torch.maximum(m[2], m[1], out=m[2])
    w.sub_((m[0] * step_size) / (_root(m[2]) * root_scale + eps))


def _sgd(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, l2, lr = c
    _add_l2(g, w, l2)
    w.sub_(g * lr)


def _momentum(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, l2, lr, keep, take, ahead = c
    _add_l2(g, w, l2)
    m[0].mul_(keep).add_(g * take)
    direction = g + m[0] * ahead if ahead != 0.0 else m[0]
    w.sub_(direction * lr)


def _adagrad(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, l2, lr, eps = c
    _add_l2(g, w, l2)
    m[0].add_(g * g)
    w.sub_((g * lr) / (_root(m[0]) + eps))


def _lion(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, decay, lr, keep1, take1, take2 = c
    w.mul_(decay)
    mixed = m[0] * keep1 + g * take1
    w.sub_(torch.sign(mixed) * lr)
    m[0].add_((g - m[0]) * take2)


FORMULAS: Mapping[str, Formula] = {
    "adam": _adam,
    "amsgrad": _amsgrad,
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "lion": _lion,
}


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
    kernel: str,
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
    formula = FORMULAS[kernel]
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
