"""Buffers for tests of optimizer rules: a weight, its state and gradients, in any formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overspill.optim import Field, Master, Moments, Rule, StepScalars, kernels, reference
from overspill.optim.adagrad import AdagradRule
from overspill.optim.adam import AdamRule
from overspill.optim.lion import LionRule
from overspill.optim.sgd import SgdRule

RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "adamw": (
        AdamRule(decoupled=True, amsgrad=False),
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    ),
    "adam": (
        AdamRule(decoupled=False, amsgrad=False),
        {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    ),
    "amsgrad": (
        AdamRule(decoupled=True, amsgrad=True),
        {"lr": 1e-3, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "maximize": True},
    ),
    "sgd": (SgdRule(momentum=False), {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.0}),
    "momentum": (
        SgdRule(momentum=True),
        {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1},
    ),
    "nesterov": (
        SgdRule(momentum=True),
        {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": True},
    ),
    "adagrad": (
        AdagradRule(),
        {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.01, "eps": 1e-10},
    ),
    "lion": (LionRule(), {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}
COMPACT_RULES = sorted(set(RULES) - {"amsgrad", "sgd"})
WEIGHTS: list[tuple[torch.dtype, Master]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "split"),
    (torch.bfloat16, "fp32"),
    (torch.float16, None),
    (torch.float16, "fp32"),
]
GRADS = [torch.float32, torch.bfloat16, torch.float16]
ODD_SIZES = [1, 7, 15, 16, 17, 55, 255, 257, 1025]


@dataclass
class Job:
    """One flat weight with its state."""

    rule: Rule
    group: dict[str, Any]
    fields: tuple[Field, ...]
    weight: Tensor
    state: dict[str, Tensor]

    def scalars(self, step: int, grad_scale: float = 1.0) -> StepScalars:
        return self.rule.scalars(self.group, step, grad_scale)

    def step(self, grad: Tensor, step: int, grad_scale: float = 1.0) -> bool:
        return self.rule.update(grad, self.weight, self.state, self.scalars(step, grad_scale))

    def step_in_torch(self, grad: Tensor, step: int, grad_scale: float = 1.0) -> bool:
        """The same by the oracle."""
        scalars = self.scalars(step, grad_scale)
        return reference.update(
            self.rule.formula,  # type: ignore[attr-defined]
            grad,
            self.weight,
            self.state,
            self.rule.moments,
            scalars.coefficients,
            scalars.noise_key,
            0,
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.state}

    def value(self) -> Tensor:
        """The fp32 weight."""
        return reference.read_weight(self.weight, self.state)


def make_job(
    name: str,
    numel: int,
    weight_dtype: torch.dtype = torch.float32,
    master: Master = None,
    moments: Moments = "fp32",
    seed: int = 0,
) -> Job:
    """A weight drawn with ``seed`` and zero state."""
    rule, group = RULES[name]
    fields = rule.state_fields(weight_dtype, master, moments)
    state = {f.name: torch.zeros(f.elements(numel), dtype=f.dtype) for f in fields}
    weight = torch.zeros(numel, dtype=weight_dtype)
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02
    reference.write_weight(drawn, weight, state)
    return Job(rule, group, fields, weight, state)


def gradients(numel: int, dtype: torch.dtype, steps: int, seed: int = 1) -> Iterator[Tensor]:
    """Gradients over seven decades; the square of every fifth is denormal."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        decade = torch.empty(numel).uniform_(-6, 1, generator=generator)
        decade[::5] -= 15
        yield (torch.randn(numel, generator=generator) * 10**decade).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, where any NaN equals any other."""
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    if not torch.equal(left.isnan(), right.isnan()):
        return False
    ints = {4: torch.int32, 2: torch.int16}[left.element_size()]
    left, right = (
        t.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) for t in (left, right)
    )
    return torch.equal(left.view(ints), right.view(ints))


def assert_same(left: Job, right: Job, about: object) -> None:
    for name, tensor in left.tensors().items():
        other = right.tensors()[name]
        if name == "master_lo":  # a NaN's lower half is any
            tensor, other = (half.masked_fill(left.weight.isnan(), 0) for half in (tensor, other))
        assert same_bits(tensor, other), (
            f"{about}: {name} differs in {int((tensor != other).sum())} of {tensor.numel()} places"
        )


def isas() -> list[str]:
    """Every instruction set of this machine."""
    return list(kernels.NATIVE.isas()) if kernels.NATIVE is not None else []
