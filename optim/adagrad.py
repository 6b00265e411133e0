"""Adagrad: the rule, and the optimizer for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .formats import Master, Moments
from .optimizer import FlatOptimizer, check_at_least_zero, refuse_graph_options
from .registry import register
from .rule import KernelRule, StepScalars, number, signed_scale, step_scalars


class AdagradCoefficients(NamedTuple):
    """In the order of the kernel."""

    grad_scale: float
    l2: float
    lr: float
    eps: float


class AdagradRule(KernelRule):
    """Duchi et al. 2011, with torch's decay of the learning rate."""

    name = "adagrad"

    def __init__(self) -> None:
        super().__init__("adagrad", ("sum",))

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"sum": float(group.get("initial_accumulator_value", 0.0))}

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> StepScalars:
        coefficients = AdagradCoefficients(
            grad_scale=signed_scale(group, grad_scale),
            l2=number(group, "weight_decay"),
            lr=number(group, "lr") / (1 + (step - 1) * number(group, "lr_decay")),
            eps=number(group, "eps"),
        )
        return step_scalars(step, coefficients)


class Adagrad(FlatOptimizer):
    """Adagrad for CPU tensors, one pass over memory.  Arguments as in ``torch.optim.Adagrad``.

    Further arguments and errors as in ``overspill.optim.Adam``.  Compact moments suit it less than
    the others: its sum only grows, and so do their rounding errors.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: Master = None,
        moments: Moments = "fp32",
    ) -> None:
        check_at_least_zero(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        refuse_graph_options(differentiable=differentiable)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, master, moments)

    def rule_of(self, group: Mapping[str, Any]) -> AdagradRule:
        return AdagradRule()


register(torch.optim.Adagrad, lambda _: AdagradRule(), measured={"adagrad": AdagradRule})
register(Adagrad, lambda _: AdagradRule())
