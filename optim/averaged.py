"""A rule that also keeps an average of the weights: one more fp32 value a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .formats import Field, Master, Moments
from .rule import ElementwiseRule, Rule, StepScalars, is_whole, number
from .whole import MASTERS, flat

AVERAGE = "average"
"""The name of the average among a parameter's state."""
DECAY = "average_decay"
"""The hyper-parameter of a group that asks for it: how much of the average stays at a step."""


def check_decay(decay: float) -> float:
    """
    Raises:
        ValueError: it is not at least 0 and less than 1.
    """
    if isinstance(decay, (bool, str)) or decay is None or not 0.0 <= decay < 1.0:
        raise ValueError(f"the decay of an average must be at least 0 and less than 1, not {decay}")
    return decay


def _average(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    if c[1] == 1.0:  # the difference would be rounded
        m[0].copy_(w)
    else:
        m[0].add_((w - m[0]) * c[1])


class _AverageRule(ElementwiseRule):
    """Leaves the weight as it is; the average moves towards it."""

    name = "average"

    def __init__(self) -> None:
        super().__init__("average", (AVERAGE,), _average)

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> tuple[float, ...]:
        # As torch.optim.swa_utils.AveragedModel: the first step's weights are the first average.
        decay = check_decay(number(group, DECAY))
        return 1.0, 1.0 if step == 1 else 1.0 - decay


_RULE = _AverageRule()


class AveragedRule:
    """Another rule, and after it the average of what it has made of the weights (or of their
    masters): ``average += (1 - decay) * (weight - average)``."""

    def __init__(self, inner: Rule) -> None:
        if AVERAGE in inner.moments:
            raise ValueError(f"the rule {inner.name!r} has a moment named {AVERAGE!r} of its own")
        self.inner = inner
        self.whole = is_whole(inner)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def moments(self) -> tuple[str, ...]:
        return (*self.inner.moments, AVERAGE)

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments,
        shape: tuple[int, ...] = (),
    ) -> tuple[Field, ...]:  # fmt: skip
        if is_whole(self.inner):
            fields = self.inner.state_fields(weight_dtype, master, moments, shape)
        else:
            fields = self.inner.state_fields(weight_dtype, master, moments)
        return (*fields, Field(AVERAGE, torch.float32))

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        return self.inner.steps_taken({k: v for k, v in state.items() if k != AVERAGE})

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return self.inner.initial(group)

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> StepScalars:
        scalars = self.inner.scalars(group, step, grad_scale)
        own = _RULE.coefficients(group, step, 1.0)
        return replace(scalars, coefficients=(*scalars.coefficients, *own))

    def update(
        self,
        grad: Tensor,
        weight: Tensor,
        state: Mapping[str, Tensor],
        scalars: StepScalars,
        position: int = 0,
    ) -> bool:
        own = len(scalars.coefficients) - 2
        parts = scalars.coefficients[:own], scalars.coefficients[own:]
        theirs, ours = (replace(scalars, coefficients=part) for part in parts)
        others = {name: part for name, part in state.items() if name != AVERAGE}
        kept = {name: state[name] for name in (*MASTERS, AVERAGE) if name in state}
        finite = self.inner.update(grad, weight, others, theirs, position)
        if self.whole:
            grad, weight = flat(grad), flat(weight)
            kept = {name: flat(each) for name, each in kept.items()}
        return _RULE.update(grad, weight, kept, ours, position) and finite


def check_kept(rule: Rule, group: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: the group asks for an average and its rule keeps none, or the other way round.
    """
    if (DECAY in group) != (AVERAGE in rule.moments):
        raise ValueError(
            f"a param group {'has' if DECAY in group else 'lacks'} {DECAY!r}, but its state was "
            "laid out otherwise: call overspill.ema(optimizer, decay) before wrap, and leave it"
        )


def averaged(rule: Rule, group: Mapping[str, Any]) -> Rule:
    """The rule of a param group, with an average where the group asks for one."""
    return AveragedRule(rule) if DECAY in group else rule


def is_reentrant(rule: Rule) -> bool:
    """Return whether two threads may use a rule for updates at once.

    The element-wise rules of this package, and rules that say ``reentrant``, keep no state in
    themselves; nothing is known of user-defined updates or formulas.
    """
    while isinstance(rule, AveragedRule):
        rule = rule.inner
    if getattr(rule, "reentrant", False) and _is_ours(type(rule)):
        return True
    return isinstance(rule, ElementwiseRule) and _is_ours(type(rule)) and _is_ours(rule.formula)


def is_own_code(rule: Rule) -> bool:
    """Return whether a rule is one of this package, with or without an average."""
    while isinstance(rule, AveragedRule):
        rule = rule.inner
    return _is_ours(type(rule))


def _is_ours(code: object) -> bool:
    return getattr(code, "__module__", "").startswith(f"{__package__}.")
