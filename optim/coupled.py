"""Optimizers that couple parameters: their own ``step`` runs on all of them at once.

See Note [Coupled optimizers].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .rule import StepScalars
from .single_step import Group, bare, same_value, shared_copies, step, with_params
from .streamed import RECORD, StreamedRule
from .whole import store_exact

# Note [Coupled optimizers]
# Prodigy and D-Adaptation estimate one step size from the gradients of all parameters; some other
# optimizers compute a norm or a mean over them, or draw random numbers in their order.  None of
# them can be run on one parameter at a time.  Their ``step`` runs inside ``optimizer.step()``, on
# copies of all exact weights, gradients and states in host memory, which the plan counts.  These
# states share no memory with records, so that a tensor that the step replaces is freed at once.
# What the step leaves is written back as the update of each parameter, so that placement, commits
# and state dicts are those of a streamed optimizer (see Note [Streamed optimizers]).
#
# The trial works in the same way, on all its small parameters together.


@dataclass
class Member:
    """A parameter in a coupled step.

    Attributes:
        shape: of the parameter.
        index: of the parameter in the engine; ``None`` if it is not trained.
        param: has a copy of the exact weight, in fp32, and of the gradient if there is one; the
            step changes both.  ``None`` if it is not trained.
        state: a copy of its state; the step changes it.
    """

    shape: tuple[int, ...]
    index: int | None = None
    param: nn.Parameter | None = None
    state: dict[str, Any] = field(default_factory=dict)


class CoupledRule(StreamedRule):
    """The rule of one param group of an optimizer that couples parameters.

    Attributes:
        optimizer: that of the group, with the rules of all its groups.
        results: by parameter with a gradient, the exact weight and the state after the step that
            was computed last, until they are written.
    """

    coupled = True

    def __init__(
        self, source: torch.optim.Optimizer, group: Mapping[str, Any], optimizer: CoupledOptimizer
    ) -> None:
        super().__init__(source, group)
        self.optimizer = optimizer
        self.results: dict[int, tuple[nn.Parameter, dict[str, Any]]] = {}

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        raise RuntimeError(f"{self.name} steps all parameters at once")

    def write(self, index: int, weight: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Write what the step computed for a parameter; return whether the weight is finite."""
        param, values = self.results.pop(index)
        self.write_record(state[RECORD], values, param, [])
        return store_exact(param.detach().to(weight.device), weight, state)

    def copy_of(self, record: Tensor, param: nn.Parameter) -> dict[str, Any]:
        """Return a copy of the state in a parameter's record."""
        form = self.format_of(tuple(param.shape))
        return form.read(record, param, self.classes, copies=True)[0]


class CoupledOptimizer:
    """An optimizer whose own step runs on copies of all its parameters."""

    def __init__(self, source: torch.optim.Optimizer) -> None:
        self.rules = tuple(CoupledRule(source, group, self) for group in source.param_groups)

    def step(
        self, groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Member]]
    ) -> list[Group]:
        """Run the step, which changes weights and states of members, and leave the results.

        Args:
            groups: hyper-parameters of all groups; they are not changed.
            members: the parameters of each group, in their order.

        Returns:
            The hyper-parameters that the step has set, by group.

        Raises:
            RuntimeError: the state of a parameter no longer fits its record.
        """
        own = bare(self.rules[0].own, apart=True)
        before, now = shared_copies(groups), shared_copies(groups)
        given: list[tuple[CoupledRule, Member, nn.Parameter]] = []  # those with a gradient
        for rule, options, of_group in zip(self.rules, now, members, strict=True):
            rule.results.clear()
            params = [_nothing(m.shape) if m.param is None else m.param for m in of_group]
            own.param_groups.append(with_params(options, params, named=rule.named))
            own.state.update({p: m.state for p, m in zip(params, of_group, strict=True) if m.state})
            pairs = zip(of_group, params, strict=True)
            given += [(rule, member, p) for member, p in pairs if p.grad is not None]
        step(own)
        for rule, member, param in given:
            param.grad, member.state = None, own.state.get(param, {})
            rule.check_record(member.state, param)
            if member.index is not None:
                rule.results[member.index] = param, member.state
        return [
            {k: v for k, v in after.items() if k not in old or not same_value(old[k], v)}
            for old, after in zip(before, map(_options, own.param_groups), strict=True)
        ]


def _options(group: Mapping[str, Any]) -> Group:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _nothing(shape: tuple[int, ...]) -> nn.Parameter:
    """Return a parameter in the place of one that is not trained: NaN, without memory."""
    nothing = torch.full((), math.nan, device="cpu").expand(shape)
    return nn.Parameter(nothing, requires_grad=False)
