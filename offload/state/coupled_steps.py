"""Steps of optimizers that couple parameters; see Note [Coupled optimizers]."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from ..grads.held_gradients import HeldGradients
from ..movement.runtime import Runtime
from ..optim.coupled import CoupledOptimizer, CoupledRule, Member
from ..optim.streamed import RECORD
from .contents import Contents


class CoupledSteps:
    """Computes what coupled optimizers do in a step, before the step is taken."""

    def __init__(
        self, runtime: Runtime, groups: Sequence[dict[str, Any]], contents: Contents,
        held: HeldGradients,
    ) -> None:  # fmt: skip
        blueprint = runtime.blueprint
        self._groups, self._contents, self._held = groups, contents, held
        self._ledger, self._direct, self._parts = runtime.ledger, runtime.direct, blueprint.parts
        self._index = {id(p): index for index, p in enumerate(blueprint.parts.parameters)}
        self._rules = {n: r for n, r in enumerate(blueprint.rules) if isinstance(r, CoupledRule)}
        # The optimizers, and the numbers of their groups, which are neighbours.
        self._optimizers: dict[CoupledOptimizer, list[int]] = {}
        for number, rule in self._rules.items():
            self._optimizers.setdefault(rule.optimizer, []).append(number)

    def compute(
        self, units: Mapping[int, frozenset[int]], scale: float, groups: Container[int]
    ) -> Mapping[int, dict[str, Any]]:
        """Run the steps on copies, and leave the results with the rules.

        Args:
            units: by unit, the parameters that have a gradient.
            scale: of all gradients.
            groups: the param groups of the optimizers that take a step.

        Returns:
            By group, the hyper-parameters after it.
        """
        stepped = {o: numbers for o, numbers in self._optimizers.items() if numbers[0] in groups}
        if not stepped:
            return {}
        self._direct.quiesce()
        present = frozenset().union(*units.values())
        made = self._members(present, scale)
        after: dict[int, dict[str, Any]] = {}
        for optimizer, numbers in stepped.items():
            members = [[self._member(p, made) for p in self._groups[n]["params"]] for n in numbers]
            values = optimizer.step([self._groups[n] for n in numbers], members)
            after.update(zip(numbers, values, strict=True))
        return after

    def _member(self, p: Any, made: Mapping[int, Member]) -> Member:
        member = made.get(self._index.get(id(p), -1))
        return Member(tuple(p.shape)) if member is None else member

    def _members(self, present: frozenset[int], scale: float) -> dict[int, Member]:
        """Return copies of all that coupled optimizers train, by parameter."""
        made: dict[int, Member] = {}
        for unit in self._parts.units:
            rules = {
                number: self._rules[chunk.group] for number, chunk in enumerate(unit.chunks)
                if chunk.group in self._rules
            }  # fmt: skip
            if not rules:
                continue
            exact = {spec.index: value for spec, value in self._contents.masters(unit.index)}
            for number, rule in rules.items():
                (spec,) = unit.chunks[number].params
                param = nn.Parameter(exact[spec.index])
                if spec.index in present:
                    factor = scale * self._ledger.scales.get(spec.index, 1.0)
                    param.grad = self._held.exact(spec.index, factor)
                record = self._contents.stored(unit.index, number)[spec.index][RECORD]
                state = rule.copy_of(record, param)
                made[spec.index] = Member(tuple(spec.shape), spec.index, param, state)
        return made
