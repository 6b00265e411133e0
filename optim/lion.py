"""Lion: the rule, and the optimizer for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .formats import Master, Moments
from .optimizer_base import FlatOptimizer, check_at_least_zero
from .registry import register
from .rule import ElementwiseRule, number


class LionCoefficients(NamedTuple):
    """In the order of the kernel; ``take`` is 1 - beta, ``keep`` beta."""

    grad_scale: float
    decay: float
    lr: float
    keep1: float
    take1: float
    take2: float


def _lion(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, decay, lr, keep1, take1, take2 = c
    w.mul_(decay)
    mixed = m[0] * keep1 + g * take1
    w.sub_(torch.sign(mixed) * lr)
    m[0].add_((g - m[0]) * take2)


class LionRule(ElementwiseRule):
    """Chen et al. 2023: the sign of a mixture of momentum and gradient; decoupled decay."""

    name = "lion"

    def __init__(self) -> None:
        super().__init__("lion", ("exp_avg",), _lion)

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> LionCoefficients:
        lr = number(group, "lr")
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return LionCoefficients(
            grad_scale=grad_scale,
            decay=1 - lr * number(group, "weight_decay"),
            lr=lr,
            keep1=beta1,
            take1=1 - beta1,
            take2=1 - beta2,
        )


class Lion(FlatOptimizer):
    """Lion for CPU tensors, one pass over memory.

    Args:
        betas: of the mixture whose sign is taken, and of the momentum.
        weight_decay: decoupled, as in AdamW.

    Further arguments and errors as in ``overspill.optim.Adam``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: Master = None,
        moments: Moments = "fp32",
    ) -> None:
        check_at_least_zero(lr=lr, weight_decay=weight_decay)
        for beta in betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas must be at least 0 and less than 1, not {betas}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master, moments)

    def rule_of(self, group: Mapping[str, Any]) -> LionRule:
        return LionRule()


register(Lion, lambda _: LionRule(), measured={"lion": LionRule})
