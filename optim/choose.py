"""From an optimizer to its rule."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .adagrad import Adagrad, AdagradRule
from .adam import Adam, AdamRule, AdamW
from .lion import Lion, LionRule
from .rule import Rule
from .sgd import SGD, SgdRule


def _any(optimizer: torch.optim.Optimizer, key: str) -> bool:
    return any(bool(group.get(key)) for group in optimizer.param_groups)


def _adam(optimizer: torch.optim.Optimizer) -> Rule:
    decoupled = isinstance(optimizer, (torch.optim.AdamW, AdamW))
    return AdamRule(decoupled=decoupled, amsgrad=_any(optimizer, "amsgrad"))


def _sgd(optimizer: torch.optim.Optimizer) -> Rule:
    return SgdRule(momentum=_any(optimizer, "momentum"))


MAKERS: dict[type[torch.optim.Optimizer], Callable[[torch.optim.Optimizer], Rule]] = {
    torch.optim.AdamW: _adam,
    torch.optim.Adam: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: lambda _: AdagradRule(),
    AdamW: _adam,
    Adam: _adam,
    SGD: _sgd,
    Adagrad: lambda _: AdagradRule(),
    Lion: lambda _: LionRule(),
}


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule that an optimizer follows, in all of its groups.

    Raises:
        TypeError: there is no rule for its class (subclasses may step differently, so they do not
            count as their base), or it uses ``capturable`` or ``differentiable``.
    """
    maker = MAKERS.get(type(optimizer))
    if maker is None:
        raise TypeError(
            f"no update rule for {type(optimizer).__module__}.{type(optimizer).__qualname__}; "
            "accepted are torch.optim.{AdamW, Adam, SGD, Adagrad} and "
            "overspill.optim.{AdamW, Adam, SGD, Adagrad, Lion}"
        )
    for key in ("capturable", "differentiable"):
        if _any(optimizer, key):
            raise TypeError(f"{key}=True has no meaning outside torch's own step; leave it False")
    return maker(optimizer)
