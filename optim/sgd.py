"""SGD with momentum and Nesterov's variant: the rule, and the optimizer for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .formats import Master, Moments
from .optimizer_base import FlatOptimizer, check_at_least_zero, refuse_graph_options
from .reference import add_l2
from .registry import Group, register
from .rule import ElementwiseRule, number


class SgdCoefficients(NamedTuple):
    """In the order of the kernel, without momentum."""

    grad_scale: float
    l2: float
    lr: float


class MomentumCoefficients(NamedTuple):
    """In the order of the kernel; ``ahead`` is the momentum with Nesterov, else 0."""

    grad_scale: float
    l2: float
    lr: float
    keep: float
    take: float
    ahead: float


def _sgd(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, l2, lr = c
    add_l2(g, w, l2)
    w.sub_(g * lr)


def _momentum(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, l2, lr, keep, take, ahead = c
    add_l2(g, w, l2)
    m[0].mul_(keep).add_(g * take)
    direction = g + m[0] * ahead if ahead != 0.0 else m[0]
    w.sub_(direction * lr)


class SgdRule(ElementwiseRule):
    """Stochastic gradient descent; momentum as in Sutskever et al. 2013, in torch's form.

    Args:
        momentum: keep a momentum buffer.  Without one, groups must have momentum 0.
    """

    name = "sgd"

    def __init__(self, *, momentum: bool) -> None:
        if momentum:
            super().__init__("momentum", ("momentum_buffer",), _momentum)
        else:
            super().__init__("sgd", (), _sgd)

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> SgdCoefficients | MomentumCoefficients:
        l2 = number(group, "weight_decay")
        lr = number(group, "lr")
        momentum = number(group, "momentum")
        if not self._moments:
            if momentum != 0.0:
                raise ValueError(
                    f"momentum is {momentum}, but the state was laid out without a momentum "
                    "buffer; set momentum before the optimizer is wrapped"
                )
            return SgdCoefficients(grad_scale, l2, lr)
        if momentum == 0.0:
            raise ValueError(
                "momentum is 0, but the state was laid out with a momentum buffer, which would not "
                "follow the gradients any more; keep momentum above 0, or wrap with 0 in that group"
            )
        # The first gradient is taken whole: torch's buffer starts as a copy of it.
        first = step == 1
        return MomentumCoefficients(
            grad_scale=grad_scale,
            l2=l2,
            lr=lr,
            keep=0.0 if first else momentum,
            take=1.0 if first else 1.0 - number(group, "dampening"),
            ahead=momentum if group.get("nesterov") else 0.0,
        )


class SGD(FlatOptimizer):
    """SGD for CPU tensors, one pass over memory.  Arguments as in ``torch.optim.SGD``.

    Further arguments and errors as in ``overspill.optim.Adam``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: Master = None,
        moments: Moments = "fp32",
    ) -> None:
        check_at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs momentum above 0 and no dampening, not {momentum} and {dampening}"
            )
        refuse_graph_options(differentiable=differentiable)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, master, moments)

    def rule_of(self, group: Mapping[str, Any]) -> SgdRule:
        return SgdRule(momentum=float(group["momentum"]) != 0.0)


def _rule(group: Group) -> SgdRule:
    return SgdRule(momentum=bool(group["momentum"]))


register(
    torch.optim.SGD,
    _rule,
    measured={
        "momentum": lambda: SgdRule(momentum=True),
        "sgd": lambda: SgdRule(momentum=False),
    },
)
register(SGD, _rule)
