"""The state of optimizers that run their own step: read and written in their own format."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from ..optim import Rule
from ..optim.state_record import structure_of, tensors_in
from ..optim.streamed import RECORD, StreamedRule
from ..planning.blueprint import Blueprint
from ..schedule.units import ParamSpec
from .contents import Contents

Version = tuple[int, ...]
_NESTED = (dict, list, set)
MASTER = "overspill.master"
"""The exact weight in a streamed optimizer's state dict; the optimizer may keep a ``master``."""


def master_key(rule: Rule | None) -> str:
    """Return the name of the exact weight in the state dict of a rule's optimizer."""
    return MASTER if isinstance(rule, StreamedRule) else "master"


class StreamedState:
    """The records of streamed optimizers; see Note [Streamed optimizers] in ``optim/streamed``."""

    def __init__(self, blueprint: Blueprint, contents: Contents) -> None:
        self._blueprint, self._contents = blueprint, contents
        self._parts = blueprint.parts
        self._trees: dict[int, tuple[dict[str, Any], bytes, Version]] = {}
        self._place_of = {  # by parameter, its unit and the number of its chunk there
            chunk.params[0].index: (unit.index, number)
            for unit in blueprint.parts.units for number, chunk in enumerate(unit.chunks)
            if chunk.params
        }  # fmt: skip

    def has(self, index: int) -> bool:
        """Return whether a streamed optimizer updates a parameter."""
        return isinstance(self._blueprint.rule_of(index), StreamedRule)

    def _rule(self, index: int) -> StreamedRule:
        rule = self._blueprint.rule_of(index)
        assert isinstance(rule, StreamedRule)
        return rule

    def _shape(self, index: int) -> tuple[int, ...]:
        return tuple(self._parts.parameters[index].shape)

    def read(self, index: int, record: torch.Tensor) -> dict[str, Any]:
        """Return the state in a parameter's record; its tensors may lie over the record."""
        return self._rule(index).read(record, self._shape(index))

    def tracked(self, index: int, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a state by the names under which their changes are found.

        A streamed optimizer may keep tensors in lists and objects, so they are numbered.
        """
        if self.has(index):
            return {str(number): t for number, t in enumerate(tensors_in(values))}
        return dict(values)

    def lend(self, index: int, state: dict[str, Any], version: Version) -> None:
        """Keep a state that a user gets, to find changes of numbers and items in its containers."""
        if self.has(index) and any(isinstance(v, _NESTED) for v in state.values()):
            self._trees[index] = state, structure_of(state), version

    def changed_trees(
        self, version_of: Callable[[int, str], Version]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return the states, by parameter, of which the user changed more than tensors."""
        found = []
        for index, (state, text, version) in list(self._trees.items()):
            if version != version_of(index, RECORD):
                del self._trees[index]  # a step was taken, and this is no longer the state
            elif structure_of(state) != text:
                found.append((index, state))
                del self._trees[index]
        return found

    def with_tensors(self, index: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a parameter's record with other values of some tensors, by ``tracked`` name."""
        record = self._contents.stored(*self._place_of[index])[index][RECORD]
        state = self.read(index, record)
        now = self.tracked(index, state)
        with torch.no_grad():
            for name, value in values.items():
                now[name].copy_(value)
        return self._rule(index).stored(state, self._shape(index))

    def as_record(self, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is written for a state in the optimizer's own format.

        Raises:
            ValueError: the state does not fit; it is that of another optimizer.
        """
        rule, state = self._rule(index), dict(state)
        master = state.pop(MASTER, None)
        made = {RECORD: rule.stored(state, self._shape(index)), "step": rule.steps_taken(state)}
        return made if master is None else {**made, "master": master}

    def called(
        self, method: str, groups: Sequence[Mapping[str, Any]], unit: int, indices: Container[int]
    ) -> Callable[[ParamSpec], Mapping[str, Any] | None]:
        """Return the weights and records of parameters after ``train`` or ``eval``.

        The result is called with each parameter of the unit; see ``Contents.load``.
        """
        exact = {spec.index: value for spec, value in self._contents.masters(unit)}

        def value_of(spec: ParamSpec) -> Mapping[str, Any] | None:
            group = self._parts.groups[spec.index]
            if spec.index not in indices or group is None:
                return None
            record = self._contents.stored(*self._place_of[spec.index])[spec.index][RECORD]
            weight, record = self._rule(spec.index).called(
                method, groups[group], exact[spec.index], record
            )
            return {"weight": weight, RECORD: record}

        return value_of


def own_state(given: Mapping[str, Any], rule: StreamedRule) -> dict[str, Any]:
    """Return the part of a loaded state that a streamed optimizer itself knows.

    State of a run over bf16 or fp16 weights becomes fp32, unless the optimizer keeps that dtype.
    """
    halves = {torch.bfloat16, torch.float16} - rule.dtypes
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.dtype in halves else value
        for name, value in given.items() if name != MASTER
    }  # fmt: skip
