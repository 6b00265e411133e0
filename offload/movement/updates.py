"""The work of the update lanes: run the rule on a subgroup, and merge gradients that arrive.

Parameters without a gradient in this step keep their weights, state and step count. A subgroup is
therefore updated in runs of neighbours that have a gradient and the same step count.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..optim import Rule, StepScalars
from ..optim.averaged import check_kept, is_reentrant
from ..optim.coupled import CoupledRule
from ..optim.formats import granule_of
from ..optim.norm import accumulate, sums_of_squares
from ..optim.rule import is_whole
from ..optim.streamed import StreamedRule, share_scratch
from ..planning.plan import host_grad_dtype
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.ledger import Ledger
from ..schedule.messages import Accumulate, Clear, Update
from ..schedule.units import Chunk, Subgroup, Unit, align
from ..schedule.visits import visit_in
from .device_updates import RecordParts
from .pools import Arenas


@dataclass(frozen=True)
class Run:
    """Elements ``[start, stop)`` of a chunk that one call of the rule updates.

    Attributes:
        step: the step of their parameters.
        scale: the factor of their gradients.
        position: the position of the first element in its parameter.
    """

    start: int
    stop: int
    step: int
    scale: float
    position: int


@dataclass(frozen=True)
class Arrived:
    """How one unit's gradients arrived.

    Attributes:
        fresh: the parameters whose gradients replace earlier ones.
        added: the parameters whose gradients are added to earlier ones.
    """

    fresh: tuple[int, ...]
    added: tuple[int, ...]


class GradLayout:
    """Dtypes and offsets of each chunk's gradients in the host's copy of a unit's gradients."""

    def __init__(self, units: Sequence[Unit], accumulated: int) -> None:
        self.dtypes: list[list[torch.dtype]] = []
        self.offsets: list[list[int]] = []
        for unit in units:
            offset, offsets, dtypes = 0, [], []
            for chunk in unit.chunks:
                dtype = host_grad_dtype(chunk.dtype, accumulated)
                offsets.append(offset)
                dtypes.append(dtype)
                if chunk.group is not None:
                    offset = align(offset + chunk.numel * dtype.itemsize, 4096)
            self.offsets.append(offsets)
            self.dtypes.append(dtypes)


class Updater:
    """The tasks of the update lanes, and the facts that they need.

    Hooks pass it facts under a lock, and let it measure gradients that are gathered where they are
    kept. The engine owns it.
    """

    def __init__(
        self, layout: Layout, arenas: Arenas, rules: Sequence[Rule], ledger: Ledger,
        accumulated: int,
    ) -> None:  # fmt: skip
        """
        Args:
            rules: by param group.
        """
        self.layout, self.arenas, self.rules, self.ledger = layout, arenas, rules, ledger
        share_scratch(rules)
        self.grads = GradLayout(layout.units, accumulated)
        self._group_of = {
            s.index: chunk.group for u in layout.units for chunk in u.chunks for s in chunk.params
        }
        self._specs = {
            spec.index: (unit.index, number, spec)
            for unit in layout.units
            for number, chunk in enumerate(unit.chunks)
            for spec in chunk.params
        }
        self._subgroups = {s.index: s for group in layout.subgroups for s in group}
        self._lock = threading.Lock()
        # The lanes run reentrant rules at the same time. Other rules may keep working state in
        # the rule object, so they run one at a time.
        others = threading.Lock()
        self._calls: list[AbstractContextManager[object]] = [
            nullcontext() if is_reentrant(rule) else others for rule in rules
        ]
        self._arrived: dict[int, list[Arrived]] = {}
        self._scalars: dict[tuple[int, int, float], StepScalars] = {}
        self._snapshot: list[dict[str, Any]] | None = None

    # -- facts from the other threads -----------------------------------------------------------

    def arrived(self, unit: int, arrival: Arrived) -> None:
        """Record how the gradients that are about to be copied out must be merged."""
        with self._lock:
            self._arrived.setdefault(unit, []).append(arrival)

    def begin_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the hyper-parameters, before the first update of a step.

        Raises:
            ValueError: one of them is invalid, or does not match the existing state.
        """
        for rule, group in zip(self.rules, groups, strict=True):
            check_kept(rule, group)
            if isinstance(rule, StreamedRule):
                rule.begin_step()
            rule.scalars(group, 1)
        self._scalars.clear()
        self._snapshot = [{k: _kept(v) for k, v in g.items() if k != "params"} for g in groups]

    def changed_since_begin(
        self, groups: Sequence[Mapping[str, Any]], chosen: Container[int] | None
    ) -> str | None:
        """Return the name of a hyper-parameter that was changed after the step's first update.

        Args:
            chosen: the param groups of the optimizers that take a step; ``None``: all.
        """
        for number, (taken, group) in enumerate(zip(self._snapshot or (), groups, strict=False)):
            for key, value in taken.items() if chosen is None or number in chosen else ():
                if key in group and not _same(group[key], value):
                    return key
        return None

    def advanced(self, present: Iterable[int], groups: Container[int]) -> dict[int, dict[str, Any]]:
        """Return, by param group, the values that the optimizer itself sets in it in this step.

        Args:
            present: the parameters that have a gradient.
            groups: the param groups of the optimizers that take a step.
        """
        rules = [
            (n, rule) for n, rule in enumerate(self.rules)
            if n in groups and isinstance(rule, StreamedRule) and not rule.coupled
        ]  # fmt: skip
        if not rules:
            return {}
        assert self._snapshot is not None
        active = {self._group_of[index] for index in present}
        return {n: rule.advance(self._snapshot[n], active=n in active) for n, rule in rules}

    # -- work -----------------------------------------------------------------------------------

    def work_on(self, task: Clear | Accumulate | Update) -> bool:
        """Run one task on an update lane. Returns false if an update produced non-finite values."""
        if isinstance(task, Update):
            return self._update(task)
        if isinstance(task, Clear):
            self.arenas.bytes_of(task.place).zero_()
        else:
            self._accumulate(task)
        return True

    def _accumulate(self, task: Accumulate) -> None:
        unit = self.layout.units[task.unit]
        if task.source != task.place:
            with self._lock:
                arrival = self._arrived[task.unit].pop(0)
            for number, chunk in enumerate(unit.chunks):
                if chunk.group is not None:
                    self._merge(task, number, chunk, arrival)
        else:
            with self._lock:
                self._arrived.get(task.unit, []).clear()
        if self.ledger.measures:
            self.measure(task.unit, task.place)

    def _merge(self, task: Accumulate, number: int, chunk: Chunk, arrival: Arrived) -> None:
        source = self.arenas.typed(task.source, chunk.grad_offset, chunk.dtype, chunk.numel)
        target = self._grads(task.unit, task.place, number)
        for spec in chunk.params:
            span = slice(spec.offset, spec.offset + align(spec.numel, 64 // chunk.dtype.itemsize))
            if spec.index in arrival.fresh:
                target[span].copy_(source[span])
            elif spec.index in arrival.added:
                if target.dtype == torch.float32:
                    accumulate(target[span], source[span])
                else:
                    target[span].add_(source[span])

    def measure(self, unit: int, place: Place) -> None:
        """Measure the norms of a unit's gradients, which lie in ``place`` as they are kept."""
        for number, chunk in enumerate(self.layout.units[unit].chunks):
            if chunk.group is not None:
                flat = self._grads(unit, place, number)
                grads = [flat[s.offset : s.offset + s.numel] for s in chunk.params]
                sums = sums_of_squares(grads)
                measured = zip((s.index for s in chunk.params), sums, strict=True)
                self.ledger.squares.update(measured)

    def measure_at_home(self, indices: Iterable[int]) -> None:
        """Measure the norms of gradients that lie in their homes, all in one pass."""
        found: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
        for index in indices:
            unit, number, spec = self._specs[index]
            place = self.layout.homes[unit].grad_place
            if place is not None:
                flat = self._grads(unit, place, number)[spec.offset : spec.offset + spec.numel]
                numbers, grads = found.setdefault(flat.dtype, ([], []))
                numbers.append(index)
                grads.append(flat)
        for numbers, grads in found.values():
            self.ledger.squares.update(zip(numbers, sums_of_squares(grads), strict=True))

    def _grads(self, unit: int, place: Place, number: int) -> torch.Tensor:
        dtype, offset = self.grads.dtypes[unit][number], self.grads.offsets[unit][number]
        numel = self.layout.units[unit].chunks[number].numel
        return self.arenas.typed(place, offset, dtype, numel)

    def _parts(self, task: Update) -> RecordParts:
        """Return where state, weights and gradients of an update's subgroup live."""
        subgroup = self._subgroups[task.subgroup]
        chunk = self.layout.units[task.unit].chunks[subgroup.chunk]

        def part(whole: Place, offset: int, size: int) -> Place:
            return Place(
                whole.tier, whole.offset + offset + subgroup.start * size, subgroup.count * size
            )

        grad_size = self.grads.dtypes[task.unit][subgroup.chunk].itemsize
        return RecordParts(
            task.state,
            part(task.weights, chunk.byte_offset, chunk.dtype.itemsize),
            part(task.grads, self.grads.offsets[task.unit][subgroup.chunk], grad_size),
        )

    def visit(self, task: Update) -> tuple[RecordParts, RecordParts]:
        """Return where an update's parts live, and where they are while on the device."""
        assert task.visit is not None
        parts, visit = self._parts(task), visit_in(self.layout, self._subgroups[task.subgroup])
        offsets = (0, visit.weights_offset, visit.grads_offset)
        slot = task.visit
        there = (
            Place(slot.tier, slot.offset + offset, part.nbytes)
            for offset, part in zip(offsets, parts, strict=True)
        )
        return parts, RecordParts(*there)

    def _update(self, task: Update) -> bool:
        subgroup = self._subgroups[task.subgroup]
        chunk = self.layout.units[task.unit].chunks[subgroup.chunk]
        parts = self._parts(task) if task.visit is None else self.visit(task)[1]
        grad_dtype = self.grads.dtypes[task.unit][subgroup.chunk]
        weights = self.arenas.typed(parts.weights, 0, chunk.dtype, subgroup.count)
        grads = self.arenas.typed(parts.grads, 0, grad_dtype, subgroup.count)
        state = {
            f.name: self.arenas.typed(parts.state, f.offset, f.dtype, f.numel)
            for f in subgroup.fields
        }
        assert chunk.group is not None
        if is_whole(self.rules[chunk.group]):
            finite = self._update_whole(task.unit, chunk, subgroup, grads, weights, state)
        else:
            finite = self._update_runs(task.unit, chunk, subgroup, grads, weights, state)
        if not finite:
            self.ledger.nonfinite.append(task.unit)
        return finite

    def _update_whole(
        self, unit: int, chunk: Chunk, subgroup: Subgroup, grads: torch.Tensor,
        weights: torch.Tensor, state: Mapping[str, torch.Tensor],
    ) -> bool:  # fmt: skip
        (spec,), group, turns = chunk.params, chunk.group, self.ledger.turns(unit)
        assert group is not None
        if spec.index not in turns or not spec.numel:
            return True
        weight, own = spec.shaped(weights), {
            f.name: spec.shaped(state[f.name]) if f.block == 1 else state[f.name]
            for f in subgroup.fields
        }  # fmt: skip
        rule = self.rules[group]
        if isinstance(rule, CoupledRule):
            return rule.write(spec.index, weight, own)
        with self._calls[group]:
            scalars = self._scalars_for(group, *turns[spec.index])
            return rule.update(spec.shaped(grads), weight, own, scalars)

    def _update_runs(
        self, unit: int, chunk: Chunk, subgroup: Subgroup, grads: torch.Tensor,
        weights: torch.Tensor, state: Mapping[str, torch.Tensor],
    ) -> bool:  # fmt: skip
        finite, group = True, chunk.group
        assert group is not None
        for run in self._runs(unit, chunk, subgroup):
            inside = run.start - subgroup.start, run.stop - subgroup.start
            whole = run.stop - run.start == subgroup.count
            tensors = (grads, weights, state) if whole else (
                grads[slice(*inside)],
                weights[slice(*inside)],
                {f.name: state[f.name][f.span(*inside)] for f in subgroup.fields},
            )  # fmt: skip
            with self._calls[group]:
                scalars = self._scalars_for(group, run.step, run.scale)
                finite &= self.rules[group].update(*tensors, scalars, run.position)
        return finite

    def _runs(self, unit: int, chunk: Chunk, subgroup: Subgroup) -> list[Run]:
        """Return the runs of a subgroup; padding between parameters belongs to the one before.

        Compact moments are rounded by an element's position in its parameter, and their blocks end
        with the parameter. With them, each parameter is a run of its own.
        """
        present = self.ledger.turns(unit)
        runs: list[Run] = []
        end = subgroup.start + subgroup.count
        apart = granule_of(subgroup.fields) > 1
        for spec in chunk.params:
            border = 1 if apart else 64 // chunk.dtype.itemsize
            stop = spec.offset + align(spec.numel, border)
            low, high = max(spec.offset, subgroup.start), min(stop, end)
            if low >= high or spec.index not in present:
                continue
            turn = present[spec.index]
            last = runs[-1] if runs else None
            if last and last.stop == low and (last.step, last.scale) == turn and not apart:
                runs[-1] = replace(last, stop=high)
            else:
                runs.append(Run(low, high, *turn, low - spec.offset))
        return runs

    def _scalars_for(self, group: int, step: int, scale: float) -> StepScalars:
        scalars = self._scalars.get((group, step, scale))
        if scalars is None:
            assert self._snapshot is not None
            scalars = self.rules[group].scalars(self._snapshot[group], step, scale)
            self._scalars[group, step, scale] = scalars
        return scalars


def _kept(value: Any) -> Any:
    """Return a copy of a hyper-parameter: one in a tensor may be changed in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return bool(torch.equal(*(torch.as_tensor(each, device="cpu") for each in (left, right))))
    return bool(left == right)
