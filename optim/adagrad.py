"""Adagrad: the rule, and the optimizer for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .formats import Master, Moments
from .optimizer_base import FlatOptimizer, check_at_least_zero, refuse_graph_options
from .reference import add_l2, root
from .registry import register
from .rule import ElementwiseRule, number


class AdagradCoefficients(NamedTuple):
    """In the order of the kernel."""

    grad_scale: float
    l2: float
    lr: float
    eps: float


def _adagrad(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, l2, lr, eps = c
    add_l2(g, w, l2)
    m[0].add_(g * g)
    w.sub_((g * lr) / (root(m[0]) + eps))


class AdagradRule(ElementwiseRule):
    """Duchi et al. 2011, with torch's decay of the learning rate."""

    name = "adagrad"

    def __init__(self) -> None:
        super().__init__("adagrad", ("sum",), _adagrad)

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"sum": float(group.get("initial_accumulator_value", 0.0))}

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> AdagradCoefficients:
        return AdagradCoefficients(
            grad_scale=grad_scale,
            l2=number(group, "weight_decay"),
            lr=number(group, "lr") / (1 + (step - 1) * number(group, "lr_decay")),
            eps=number(group, "eps"),
        )


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


register(
    torch.optim.Adagrad,
    lambda _: AdagradRule(),
    unsigned=("sum",),
    measured={"adagrad": AdagradRule},
)
register(Adagrad, lambda _: AdagradRule())
