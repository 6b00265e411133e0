"""The optimizer step: which units are updated when, in every update mode."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

from ..errors import BackwardUpdateError, GradientError
from ..grads.backward_update_policy import BackwardUpdatePolicy
from ..grads.gradients import GradientCollector
from ..grads.update_waiter import OTHER_RANK, UpdateWaiter
from ..movement.updates import Updater
from ..params.backward import Backward
from ..params.onloaded_units import OnloadedUnits
from ..params.resident_param_guard import ResidentParamGuard
from ..planning.blueprint import Blueprint
from ..schedule.ledger import Ledger, Prepared

log = logging.getLogger("overspill")


class CommitsSteps(Protocol):
    """The interface of commits, and of the rollback to the last one."""

    def seal(self) -> None: ...

    def wanted(self, count: int) -> bool: ...

    def rollback(self, give_up: Callable[[], None]) -> Any: ...


class Stepping:
    """The optimizer step, with its updates at the times that the update mode sets.

    - ``step``: all updates run inside ``step()``.
    - ``backward``: a unit is updated as soon as its gradients are there.
    - ``next_forward``: updates run behind the next forward, unit by unit; if nothing moves, they
      run inside ``step()`` too.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        groups: Sequence[dict[str, Any]],
        ledger: Ledger,
        updater: Updater,
        onloaded_units: OnloadedUnits,
        backward: Backward,
        resident_guard: ResidentParamGuard,
        update_waiter: UpdateWaiter,
        backward_updates: BackwardUpdatePolicy,
        collector: GradientCollector,
        commits: CommitsSteps | None,
        renew: Callable[[], None],
        random_states: Callable[[], Mapping[str, Any]],
        compute_coupled: Callable[
            [Mapping[int, frozenset[int]], float, Container[int]], Mapping[int, dict[str, Any]]
        ],
    ) -> None:
        """
        Args:
            renew: updates tensors over the weights after a rollback to a commit.
            compute_coupled: see ``CoupledSteps.compute``.
        """
        self._config, self._groups = blueprint.config, groups
        self._judges = blueprint.judges
        self._background = blueprint.update != "step" and not blueprint.layout.still
        self._ledger, self._updater, self._onloaded_units = ledger, updater, onloaded_units
        self._backward, self._resident_guard, self._update_waiter = (
            backward,
            resident_guard,
            update_waiter,
        )
        self._backward_updates, self._collector, self._commits = (
            backward_updates,
            collector,
            commits,
        )
        self._renew, self._random_states = renew, random_states
        self._compute_coupled = compute_coupled
        ledger.when_taken(self._taken)
        self._protocol = onloaded_units.executor.protocol

    def backward_over(self) -> None:
        """Count a micro-step: the outermost backward pass has ended."""
        self._ledger.micro_steps += 1

    def step(self, groups: Container[int] | None = None) -> None:
        """Update every parameter that has a gradient, in the background if the mode says so.

        With ``groups``, update only the parameters in these param groups.

        An exception at any point leaves either no step or a whole one. Until the machine gets the
        step, nothing has changed except which resident weights are shown.
        """
        self._backward.abandon()
        if self._commits is not None:
            self._commits.seal()
        with self._backward_updates.all_final():
            self._collector.take_user_grads()
        self._refuse_changed_groups(groups)
        if not self._ledger.early:
            self._update_waiter.wait_for_updates()
        # Several ranks cannot roll back on their own: some may not have this step's commit.
        alone = self._ledger.over_ranks is None
        if alone and self._ledger.nonfinite and self._config.on_nonfinite == "rollback":
            self._back("the last update gave values that are not finite")
            return
        self._update_waiter.raise_nonfinite()
        units = self._present(groups)
        if groups is not None:
            self._refuse_others(groups)
        for unit, present in units.items():
            self._collector.refuse_torn(present)
            if unit not in self._ledger.early:
                self._backward_updates.refuse_consumed(present)
        self._backward_updates.refuse_dropped(self._collector.live)
        scale = self._verdict(units)
        if scale is None:
            return
        self._take(units, scale, range(len(self._groups)) if groups is None else groups)
        self._resident_guard.hide_all()  # shown where parts of the model were called
        if not self._background:
            self._update_waiter.wait_for_updates()
            if not alone:
                self._update_waiter.raise_nonfinite()

    def _present(self, groups: Container[int] | None) -> dict[int, frozenset[int]]:
        """Return, by unit, the parameters that have a gradient and are in one of the groups."""
        parts, found = self._onloaded_units.parts, {}
        for unit in parts.units:
            present = self._collector.present(unit.index)
            if groups is not None:
                present = frozenset(i for i in present if parts.groups[i] in groups)
            if present:
                found[unit.index] = present
        return found

    def _refuse_others(self, groups: Container[int]) -> None:
        """Raise if backward has applied gradients of parameters that are in none of the groups."""
        parts = self._onloaded_units.parts
        for unit in sorted(self._ledger.early):
            if any(parts.groups[index] not in groups for index in self._ledger.turns(unit)):
                raise BackwardUpdateError(
                    f"update='backward' has applied the gradients of {parts.units[unit].name!r} "
                    "already, but step() of their optimizer was not called. No step was taken. "
                    "Call step() of all optimizers before you use the model or their state; freeze "
                    "a model that a loss only passes through (requires_grad_(False)); or use "
                    "update='next_forward'"
                )

    def _take(
        self, units: Mapping[int, frozenset[int]], scale: float, groups: Container[int]
    ) -> None:
        ledger, commits = self._ledger, self._commits
        if not ledger.early:
            self._updater.begin_step(self._groups)
        later = [unit for unit in units if unit not in ledger.early]
        for unit in later:
            self._onloaded_units.compute_over(unit)
        self._resident_guard.end_graphs(later)
        coupled = self._compute_coupled(units, scale, groups)
        commit = commits is not None and commits.wanted(ledger.count + 1)
        random = {} if commits is None else self._random_states()
        indices = [index for present in units.values() for index in present]
        advanced = self._updater.advanced(indices, groups)
        ledger.next = Prepared(units, scale, commit, random, {**advanced, **coupled})
        self._protocol.step(tuple(units), background=self._background, commit=commit)

    def _taken(self, step: Prepared) -> None:
        for number, values in step.groups.items():
            self._groups[number].update(values)

    def _refuse_changed_groups(self, groups: Container[int] | None) -> None:
        changed = None
        if self._ledger.early:
            changed = self._updater.changed_since_begin(self._groups, groups)
        if changed is not None:
            raise BackwardUpdateError(
                f"{changed!r} was changed after update='backward' had begun to apply it; change "
                "hyper-parameters between step() and the next backward()"
            )

    def rollback(self) -> Any:
        """Roll back to the last commit, and return its ``extra``."""
        assert self._commits is not None
        extra = self._commits.rollback(self._give_up)
        self._renew()
        return extra

    def _back(self, why: str) -> None:
        log.warning("overspill: %s; no step is taken", why)
        self.rollback()

    def _give_up(self) -> None:
        """End a step that has begun, and drop all gradients and records of non-finite values."""
        self._backward.abandon()
        self._protocol.give_up(begun=bool(self._ledger.early))
        self._ledger.give_up()
        self._collector.drop()
        self._ledger.forget_gradients()

    def _verdict(self, units: Mapping[int, frozenset[int]]) -> float | None:
        """Return the factor that limits the norm to ``max_grad_norm``; ``None``: take no step.

        A global norm that is not finite ends the step before anything has changed. Once updates run
        in the background, it would be too late to report it.
        """
        if not self._judges:
            return 1.0
        self._protocol.await_gradients()
        indices = [i for present in units.values() for i in present]
        self._collector.measure(indices)
        total = self._ledger.global_norm(indices)
        if not math.isfinite(total):
            bad = [i for i in indices if not math.isfinite(self._ledger.total_norm([i]))]
            names = {self._onloaded_units.parts.unit_of[i]: None for i in bad}
            listed = ", ".join(
                self._onloaded_units.parts.units[unit].name for unit in sorted(names)
            )
            listed = listed or OTHER_RANK
            if self._config.on_nonfinite == "rollback":
                self._back(f"gradients are not finite in {listed}")
                return None
            if self._config.on_nonfinite == "skip":
                log.warning("overspill: gradients are not finite in %s; no step is taken", listed)
                self._ledger.micro_steps = 0
                return None
            raise GradientError(
                f"gradients are not finite in {listed}; no weight was changed; lower the learning "
                "rate, or look for the first loss that is not finite"
            )
        limit = self._config.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (total + 1e-6))
