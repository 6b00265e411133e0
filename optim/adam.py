"""Adam, AdamW and AMSGrad: the rule, and the optimizers for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .formats import Field, Master, Moments
from .optimizer_base import FlatOptimizer, check_at_least_zero, refuse_graph_options
from .reference import add_l2, root
from .registry import Maker, register
from .rule import ElementwiseRule, number


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


def _adam_moments(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, decay, l2, take1, keep2, take2, *_ = c
    add_l2(g, w, l2)
    w.mul_(decay)
    m[0].add_((g - m[0]) * take1)
    m[1].mul_(keep2).add_((g * take2) * g)


def _adam(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    root_scale, eps, step_size = c[6:9]
    _adam_moments(g, w, m, c)
    w.sub_((m[0] * step_size) / (root(m[1]) * root_scale + eps))


def _amsgrad(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    root_scale, eps, step_size = c[6:9]
    _adam_moments(g, w, m, c)
    torch.maximum(m[2], m[1], out=m[2])
    w.sub_((m[0] * step_size) / (root(m[2]) * root_scale + eps))


class AdamRule(ElementwiseRule):
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
            super().__init__("amsgrad", (*moments, "max_exp_avg_sq"), _amsgrad)
        else:
            super().__init__("adam", moments, _adam)
        self._decoupled, self._amsgrad = decoupled, amsgrad

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments
    ) -> tuple[Field, ...]:
        if self._amsgrad and moments != "fp32":
            raise ValueError(
                f"amsgrad needs moments='fp32', not {moments!r}: its running maximum would climb "
                "on the rounding noise of compact moments"
            )
        return super().state_fields(weight_dtype, master, moments)

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> AdamCoefficients:
        if bool(group.get("amsgrad", self._amsgrad)) != self._amsgrad:
            raise ValueError(
                f"amsgrad is {group['amsgrad']}, but the state was laid out with "
                f"amsgrad={self._amsgrad}; set it before the optimizer is wrapped"
            )
        lr = number(group, "lr")
        weight_decay = number(group, "weight_decay")
        beta1, beta2 = (float(beta) for beta in group["betas"])
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        return AdamCoefficients(
            grad_scale=grad_scale,
            decay=1 - lr * weight_decay if decoupled else 1.0,
            l2=0.0 if decoupled else weight_decay,
            take1=1 - beta1,
            keep2=beta2,
            take2=1 - beta2,
            root_scale=(1 - beta2**step) ** -0.5,
            eps=number(group, "eps"),
            step_size=lr / (1 - beta1**step),
        )


class Adam(FlatOptimizer):
    """Adam for CPU tensors, one pass over memory.  Arguments as in ``torch.optim.Adam``.

    Args:
        foreach, fused: accepted and without effect: there is one implementation.
        capturable, differentiable: must be False.
        master: ``"split"`` or ``"fp32"`` keeps an fp32 master of low-precision parameters.
        moments: how moments are stored: ``"fp32"``, ``"bf16"`` or ``"int8"``.

    Raises:
        ValueError: a hyper-parameter out of range, formats that do not fit, a parameter that is
            not a dense floating-point tensor on the CPU.
    """

    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool | None = None,
        master: Master = None,
        moments: Moments = "fp32",
    ) -> None:
        check_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        for beta in betas:
            if not 0.0 <= float(beta) < 1.0:
                raise ValueError(f"betas must be at least 0 and less than 1, not {betas}")
        refuse_graph_options(capturable=capturable, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": self.decoupled
            if decoupled_weight_decay is None
            else decoupled_weight_decay,
        }
        super().__init__(params, defaults, master, moments)

    def rule_of(self, group: Mapping[str, Any]) -> AdamRule:
        return AdamRule(decoupled=self.decoupled, amsgrad=bool(group.get("amsgrad")))


class AdamW(Adam):
    """AdamW for CPU tensors, one pass over memory.  Arguments as in ``torch.optim.AdamW``.

    Further arguments and errors as in ``overspill.optim.Adam``.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: Master = None,
        moments: Moments = "fp32",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            master=master,
            moments=moments,
        )


def _rule(decoupled: bool) -> Maker:
    return lambda group: AdamRule(decoupled=decoupled, amsgrad=bool(group.get("amsgrad")))


register(
    torch.optim.AdamW,
    _rule(True),
    unsigned=("exp_avg_sq", "max_exp_avg_sq"),
    measured={
        "adamw": lambda: AdamRule(decoupled=True, amsgrad=False),
        "amsgrad": lambda: AdamRule(decoupled=True, amsgrad=True),
    },
)
register(torch.optim.Adam, _rule(False))
register(AdamW, _rule(True))
register(Adam, _rule(False))
