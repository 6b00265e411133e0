"""Adam, AdamW and AMSGrad as rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .rule import KernelRule, StepScalars, number, signed_scale, step_scalars


class AdamCoefficients(NamedTuple):
    """In the order of the kernel; ``take`` is 1 - beta, ``keep`` beta."""

    grad_scale: float
    decay: float
    l2: float
    take1: float
    keep2: float
    take2: float
    root_scale: float
    eps: float
    step_size: float


class AdamRule(KernelRule):
    """Kingma & Ba 2015; decoupled decay as in Loshchilov & Hutter 2019; AMSGrad as an option.

    Args:
        decoupled: decay the weight itself; otherwise add the decay to the gradient.  A group's own
            ``decoupled_weight_decay`` comes first.
        amsgrad: keep the running maximum of the second moment.
    """

    name = "adam"

    def __init__(self, *, decoupled: bool, amsgrad: bool) -> None:
        moments = ("exp_avg", "exp_avg_sq")
        if amsgrad:
            super().__init__("amsgrad", (*moments, "max_exp_avg_sq"))
        else:
            super().__init__("adam", moments)
        self._decoupled = decoupled

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> StepScalars:
        lr = number(group, "lr")
        weight_decay = number(group, "weight_decay")
        beta1, beta2 = (float(beta) for beta in group["betas"])
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        coefficients = AdamCoefficients(
            grad_scale=signed_scale(group, grad_scale),
            decay=1 - lr * weight_decay if decoupled else 1.0,
            l2=0.0 if decoupled else weight_decay,
            take1=1 - beta1,
            keep2=beta2,
            take2=1 - beta2,
            root_scale=(1 - beta2**step) ** -0.5,
            eps=number(group, "eps"),
            step_size=lr / (1 - beta1**step),
        )
        return step_scalars(step, coefficients)
