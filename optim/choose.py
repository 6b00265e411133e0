"""From an optimizer to the rules of its param groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .adagrad import Adagrad, AdagradRule
from .adam import Adam, AdamRule, AdamW
from .lion import Lion, LionRule
from .rule import Rule
from .sgd import SGD, SgdRule

Group = Mapping[str, Any]
Maker = Callable[[Group], Rule]


def _adam(decoupled: bool) -> Maker:
    return lambda group: AdamRule(decoupled=decoupled, amsgrad=bool(group.get("amsgrad")))


def _sgd(group: Group) -> Rule:
    return SgdRule(momentum=bool(group["momentum"]))


MAKERS: dict[type[torch.optim.Optimizer], Maker] = {
    torch.optim.AdamW: _adam(True),
    torch.optim.Adam: _adam(False),
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: lambda _: AdagradRule(),
    AdamW: _adam(True),
    Adam: _adam(False),
    SGD: _sgd,
    Adagrad: lambda _: AdagradRule(),
    Lion: lambda _: LionRule(),
}


def rules_for(optimizer: torch.optim.Optimizer) -> tuple[Rule, ...]:
    """The rule of each param group, by the options that the group has now.

    Raises:
        TypeError: there is no rule for the optimizer's class (subclasses may step differently, so
            they do not count as their base), or it uses ``capturable`` or ``differentiable``.
    """
    maker = MAKERS.get(type(optimizer))
    if maker is None:
        raise TypeError(
            f"no update rule for {type(optimizer).__module__}.{type(optimizer).__qualname__}; "
            "accepted are torch.optim.{AdamW, Adam, SGD, Adagrad} and "
            "overspill.optim.{AdamW, Adam, SGD, Adagrad, Lion}"
        )
    for key in ("capturable", "differentiable"):
        if any(bool(group.get(key)) for group in optimizer.param_groups):
            raise TypeError(f"{key}=True has no meaning outside torch's own step; leave it False")
    return tuple(maker(group) for group in optimizer.param_groups)
