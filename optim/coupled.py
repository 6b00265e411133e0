"""Optimizers that couple parameters: their own ``step`` runs on all of them at once.

See Note [Coupled optimizers].
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .rule import StepScalars
from .single_step import Group, bare, group_of, options_of, step
from .streamed import RECORD, StreamedRule

# Note [Coupled optimizers]
# Prodigy and D-Adaptation estimate one step size from the gradients of all parameters; some other
# optimizers compute a norm or a mean over them, or draw random numbers in their order.  None of
# them can be run on one parameter at a time.  Their ``step`` runs inside ``optimizer.step()``, on
# copies of all exact weights, gradients and states in host memory.  The plan counts this memory.
# What the step leaves is written back as the update of each parameter, so that placement, commits
# and state dicts are those of a streamed optimizer (see Note [Streamed optimizers]).
#
# The trial is the same as well, with all small parameters together.


@dataclass
class Member:
    """A parameter in a coupled step.

    Attributes:
        shape: of the parameter.
        index: of the parameter in the engine; ``None`` if it is not trained.
        weight: the exact weight in fp32; the step changes it.  ``None`` if it is not trained.
        grad: in fp32; ``None`` if it has none in this step.
        record: its state; the step changes it.
    """

    shape: tuple[int, ...]
    index: int | None = None
    weight: Tensor | None = None
    grad: Tensor | None = None
    record: Tensor | None = None


class CoupledRule(StreamedRule):
    """The rule of one param group of an optimizer that couples parameters.

    Attributes:
        optimizer: that of the group, with the rules of all its groups.
        results: by parameter, the exact weight and the record after the step that was computed
            last, until they are written.
    """

    coupled = True

    def __init__(
        self, source: torch.optim.Optimizer, group: Mapping[str, Any], optimizer: CoupledOptimizer
    ) -> None:
        super().__init__(source, group)
        self.optimizer = optimizer
        self.results: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        raise RuntimeError(f"{self.name} steps all parameters at once")

    def write(self, index: int, weight: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Write what the step computed for a parameter; return whether the weight is finite."""
        exact, record = self.results.pop(index)
        state[RECORD].copy_(record)
        return self._store(exact.to(weight.device), weight, state)


class CoupledOptimizer:
    """An optimizer whose own step runs on copies of all its parameters."""

    def __init__(self, source: torch.optim.Optimizer) -> None:
        self.rules = tuple(CoupledRule(source, group, self) for group in source.param_groups)

    def step(
        self, groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Member]]
    ) -> list[Group]:
        """Run the step; it changes weights and records of members.

        Args:
            groups: hyper-parameters of all groups; they are not changed.
            members: the parameters of each group, in their order.

        Returns:
            The hyper-parameters after the step.

        Raises:
            RuntimeError: the state of a parameter no longer fits its record.
        """
        own = bare(self.rules[0].own, apart=True)
        stepped: list[tuple[StreamedRule, Member, nn.Parameter, Any]] = []
        for rule, group, of_group in zip(self.rules, groups, members, strict=True):
            params = []
            for member in of_group:
                if member.weight is None:  # whoever reads it gets an error
                    nothing = torch.empty(member.shape, device="meta")
                    params.append(nn.Parameter(nothing, requires_grad=False))
                    continue
                param = nn.Parameter(member.weight)
                param.grad = member.grad
                params.append(param)
                assert member.record is not None
                state, slots = rule.format_of(member.shape).read(member.record, param, rule.classes)
                if state:
                    own.state[param] = state
                stepped.append((rule, member, param, slots))
            own.param_groups.append(group_of(group, params, named=rule.named))
        step(own)
        for of, member, param, slots in stepped:
            member.weight, member.grad = param.detach(), None
            assert member.record is not None
            of.write_record(member.record, own.state.get(param, {}), param, slots)
        return [options_of(group) for group in own.param_groups]


def first_member(rule: StreamedRule, weight: Tensor) -> Member:
    """Return a member that has taken no step."""
    shape = tuple(weight.shape)
    return Member(shape, None, weight, None, rule.stored(copy.deepcopy(rule.first_state), shape))
