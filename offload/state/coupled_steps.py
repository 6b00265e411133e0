"""Steps of optimizers that couple parameters; see Note [Coupled optimizers]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        # The optimizers, and the numbers of their groups, which are neighbours.
        self._optimizers: dict[CoupledOptimizer, list[int]] = {}
        for number, rule in enumerate(blueprint.rules):
            if isinstance(rule, CoupledRule):
                self._optimizers.setdefault(rule.optimizer, []).append(number)

    def compute(
        self, units: Mapping[int, frozenset[int]], scale: float
    ) -> Mapping[int, dict[str, Any]]:
        """Run the steps on copies, and leave the results with the rules.

        Args:
            units: by unit, the parameters that have a gradient.
            scale: of all gradients.

        Returns:
            By group, the hyper-parameters after it.
        """
        if not self._optimizers:
            return {}
        self._direct.quiesce()
        present = frozenset().union(*units.values())
        made = self._members(present, scale)
        after: dict[int, dict[str, Any]] = {}
        for optimizer, numbers in self._optimizers.items():
            members = [[self._member(p, made) for p in self._groups[n]["params"]] for n in numbers]
            values = optimizer.step([self._groups[n] for n in numbers], members)
            for rule, of_group in zip(optimizer.rules, members, strict=True):
                rule.results = {
                    m.index: (m.weight, m.record) for m in of_group
                    if m.index in present and m.weight is not None and m.record is not None
                }  # fmt: skip
            after.update(zip(numbers, values, strict=True))
        return after

    def _member(self, p: Any, made: Mapping[int, Member]) -> Member:
        member = made.get(self._index.get(id(p), -1))
        return Member(tuple(p.shape)) if member is None else member

    def _members(self, present: frozenset[int], scale: float) -> dict[int, Member]:
        """Return copies of all that coupled optimizers train, by parameter."""
        of_coupled = {n for numbers in self._optimizers.values() for n in numbers}
        made: dict[int, Member] = {}
        for unit in self._parts.units:
            chunks = [n for n, chunk in enumerate(unit.chunks) if chunk.group in of_coupled]
            if not chunks:
                continue
            exact = {spec.index: value for spec, value in self._contents.masters(unit.index)}
            for number in chunks:
                (spec,) = unit.chunks[number].params
                index = spec.index
                record = self._contents.stored(unit.index, number)[index][RECORD]
                made[index] = Member(
                    tuple(spec.shape), index, exact[index], self._gradient(index, scale)
                    if index in present else None, record,
                )  # fmt: skip
        return made

    def _gradient(self, index: int, scale: float) -> Any:
        return self._held.exact(index, scale * self._ledger.scales.get(index, 1.0))
