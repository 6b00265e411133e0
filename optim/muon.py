"""Muon (Jordan et al. 2024), with the operators of ``torch.optim.Muon``, so that bits are equal.

The momentum is its only state.  Its matrix products run where the tensors are: the planner brings
them to the device, see Note [Device updates of matrices].
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compact import Noise, noise_key
from .formats import Field, Master, Moments, master_fields, moment_fields
from .reference import read_moment, write_moment
from .registry import register
from .rule import StepScalars, number
from .whole import exact_weight, flat, store_exact

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class MuonScalars(StepScalars):
    """One step; ``coefficients`` are the gradient's factor, weight decay, momentum and eps.

    Attributes:
        lr: a CPU tensor without dimensions if the user gave one, since its arithmetic is in fp32.
        adjusted: how ``lr`` depends on the shape; see ``torch.optim.Muon``.
        newton_schulz: the coefficients of the iteration.
        iterations: number of Newton-Schulz iterations.
    """

    lr: float | Tensor = 0.0
    nesterov: bool = True
    adjusted: str | None = None
    newton_schulz: tuple[float, ...] = ()
    iterations: int = 0


class MuonRule:
    """The rule of a param group of ``torch.optim.Muon``."""

    name = "muon"
    moments = (MOMENTUM,)
    whole = reentrant = True

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments,
        shape: tuple[int, ...] = (),
    ) -> tuple[Field, ...]:  # fmt: skip
        return (*master_fields(weight_dtype, master), *moment_fields(MOMENTUM, moments))

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        return int(state.get(MOMENTUM) is not None)

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> MuonScalars:
        """See ``Rule.scalars``.

        Raises:
            ValueError: a hyper-parameter is not finite, ``ns_coefficients`` are not three numbers,
                or ``ns_steps`` is not a whole number below 100.
        """
        iterations, coefficients = group["ns_steps"], tuple(map(float, group["ns_coefficients"]))
        if not isinstance(iterations, numbers.Integral) or int(iterations) >= 100:
            raise ValueError(f"ns_steps must be a whole number below 100, got {iterations}")
        if len(coefficients) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {len(coefficients)}")
        values = (number(group, key) for key in ("weight_decay", "momentum", "eps"))
        lr: float | Tensor = number(group, "lr")
        if isinstance(given := group["lr"], Tensor):
            lr = given.detach().reshape(()).to("cpu", copy=True)
        return MuonScalars(
            step, (grad_scale, *values), noise_key(step), lr, bool(group["nesterov"]),
            group["adjust_lr_fn"], coefficients, int(iterations),
        )  # fmt: skip

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        """Update a matrix; see ``WholeRule``."""
        assert isinstance(scalars, MuonScalars)
        scale, decay, momentum, eps = scalars.coefficients
        total = state[MOMENTUM]
        if compact := total.dtype != torch.float32:
            stored = {name: flat(each) for name, each in state.items()}
            total = read_moment(stored, MOMENTUM).as_strided(weight.shape, weight.stride())
        if grad.dtype != torch.float32 or scale != 1.0:
            grad = grad.to(torch.float32, copy=True).mul_(scale)
        total.lerp_(grad, 1 - momentum)
        towards = grad.lerp(total, momentum) if scalars.nesterov else total
        towards = _orthogonal(towards, scalars.newton_schulz, scalars.iterations, eps)
        exact = exact_weight(weight, state)
        exact.mul_(float(1 - scalars.lr * decay))
        exact.add_(towards, alpha=-float(_adjusted(scalars.lr, scalars.adjusted, *weight.shape)))
        if compact:
            write_moment(flat(total), stored, MOMENTUM, Noise(0, 0, scalars.noise_key))
        return store_exact(exact, weight, state)


def _orthogonal(
    matrix: Tensor, coefficients: tuple[float, ...], iterations: int, eps: float
) -> Tensor:
    """Return about the nearest semi-orthogonal matrix, in bf16, by Newton-Schulz iterations."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _adjusted(lr: float | Tensor, how: str | None, rows: int, columns: int) -> float | Tensor:
    if how is None or how == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * (0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else 1.0)


if hasattr(torch.optim, "Muon"):  # since torch 2.9
    register(torch.optim.Muon, lambda group: MuonRule())
