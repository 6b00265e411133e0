"""The optimizer step: which units are updated when, in every update mode."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from .config import OffloadConfig
from .errors import OffloadError
from .runtime.backward import Backward
from .runtime.executor import Executor
from .runtime.gradients import GradientCollector
from .runtime.residences import Residences
from .runtime.saved import SavedTensors
from .runtime.updates import Updater
from .schedule.arena import Place
from .schedule.messages import Landed, Need, Release, Settled, Step

log = logging.getLogger("overspill")


class Commits(Protocol):
    """Who is told of steps where they are committed."""

    def seal(self) -> None: ...

    def wanted(self, count: int) -> bool: ...

    def stepped(self) -> None: ...

    def rollback(self) -> object: ...


class Stepping:
    """Decides between ``step`` (all inside ``step()``), ``backward`` (a unit as soon as its
    gradients are there) and ``next_forward`` (behind the next forward, unit by unit)."""

    collector: GradientCollector  # set when the model is hooked up
    committing: Commits | None = None

    def __init__(
        self,
        config: OffloadConfig,
        update: str,
        groups: Sequence[Mapping[str, Any]],
        executor: Executor,
        updater: Updater,
        residences: Residences,
        saved: SavedTensors,
        backward: Backward,
        versions: list[int],
        place_of: Callable[[int], Place],
    ) -> None:
        self._config, self.update, self._groups = config, update, groups
        self._executor, self._updater, self._residences = executor, updater, residences
        self._saved, self._backward, self._versions = saved, backward, versions
        self._place_of = place_of
        self.count = self.micro_steps = 0
        self.background = update != "step"
        self.judges = update == "next_forward" or config.max_grad_norm is not None
        self.judges |= config.on_nonfinite != "raise" and update != "backward"
        self._early: set[int] = set()  # units that this step's backward has updated
        self._late: set[int] = set()  # resident units whose update nobody has waited for yet
        self._landing = False
        self._final: bool | None = None

    # -- during backward ------------------------------------------------------------------------

    def may_update(self, unit: int, over: bool) -> bool:
        """Whether a unit may be updated now, its gradients being gathered; ``over``: no backward
        runs any more, so that a graph that is still there is in nobody's way."""
        final = self._final
        if final is None:
            final = self.micro_steps == self._config.accumulate - 1
        if self.update != "backward" or not final:
            return False
        if not over and (self._saved.live[unit] or self._residences.uses[unit]):
            return False
        if self.committing is not None:
            self.committing.seal()
        self.land()
        self._updater.begin_step(self._groups)
        self._versions[unit] += 1
        self._early.add(unit)
        return True

    def present(self, unit: int, params: Sequence[int]) -> None:
        """Says which parameters of a unit have a gradient, before its update in backward."""
        self._updater.present(unit, params, 1.0)
        self.collector.consumed.update(params)

    def refuse_consumed(self, params: Collection[int]) -> None:
        """Raises when backward has used up the gradient of one of the parameters."""
        if not self.collector.consumed.isdisjoint(params):
            raise OffloadError(
                "update='backward' has applied this gradient already; for several backward() per "
                "step set accumulate=N or use overspill.accumulate(optimizer, final=...), or use "
                "update='next_forward' to use gradients between backward and step"
            )

    def refuse_unseen(self, unit: int) -> None:
        """Raises when a resident unit was computed with while its update was under way."""
        if unit in self._late:
            name = self._residences.parts.units[unit].name
            raise OffloadError(
                f"weights of {name!r} were used without calling the module that owns them, while "
                f"their update was under way; call the module, or set update='step'"
            )

    def backward_over(self) -> None:
        """The outermost backward pass has ended."""
        self.micro_steps += 1

    @contextmanager
    def declared(self, final: bool) -> Iterator[None]:
        """Inside, every backward is (or is not) the last one of the step."""
        if not final and self.update == "backward" and self._config.accumulate == 1:
            raise OffloadError(
                "update='backward' keeps no gradients between micro-steps unless it is told to; "
                "pass accumulate=N, at least 2, to wrap"
            )
        with self._all_final(final):
            yield

    @contextmanager
    def _all_final(self, final: bool = True) -> Iterator[None]:
        before, self._final = self._final, final
        try:
            yield
        finally:
            self._final = before

    # -- the step -------------------------------------------------------------------------------

    def step(self) -> None:
        """Updates every parameter that has a gradient; in the background, if so set."""
        self._backward.abandon()
        if self.committing is not None:
            self.committing.seal()
        with self._all_final():
            self.collector.take_user_grads()
        changed = self._updater.changed_since_begin(self._groups) if self._early else None
        if changed is not None:
            raise OffloadError(
                f"{changed!r} was changed after update='backward' had begun to apply it; change "
                "hyper-parameters between step() and the next backward()"
            )
        if not self._early:
            self.land()
        if self._updater.nonfinite:
            self._back("the last update gave values that are not finite")
            return
        self._residences.check_fixed(self._late)
        units = {
            unit.index: present
            for unit in self._residences.parts.units
            if (present := self.collector.present(unit.index))
        }
        for unit, present in units.items():
            if unit not in self._early:
                self.refuse_consumed(present)
        scale = self._verdict(units)
        if scale is None:
            return
        self._updater.begin_step(self._groups)
        self._announce(units, scale)
        commit = self.committing is not None and self.committing.wanted(self.count + 1)
        self._executor.request(lambda ticket: Step(tuple(units), ticket, self.background, commit))
        self._landing = True
        self._after(units)
        if self.committing is not None:
            self.committing.stepped()
        if not self.background:
            self.land()

    def land(self) -> None:
        """Waits until the last step's updates are over; raises what they found."""
        if self._landing:
            self._executor.request(Landed)
            self._landing = False
            self._updater.end_step()
            if self._config.on_nonfinite != "rollback":  # else the next step goes back
                self._updater.raise_nonfinite()

    @property
    def partial(self) -> bool:
        """Whether a backward has updated units of a step that has not been taken."""
        return bool(self._early)

    def changed(self, unit: int) -> None:
        """A unit's weights were replaced."""
        self._versions[unit] += 1

    def _back(self, why: str) -> None:
        assert self.committing is not None
        log.warning("overspill: %s; no step is taken", why)
        self.committing.rollback()

    def give_up(self) -> None:
        """Ends a step that has begun, and drops all gradients and what was not finite."""
        self._backward.abandon()
        if self._early:
            self._executor.request(lambda ticket: Step((), ticket))
            self._landing = True
        self._early.clear()
        if self._landing:
            self._executor.request(Landed)
            self._landing = False
        self._updater.end_step()
        self._updater.nonfinite.clear()
        self.collector.drop()
        self._updater.forget_gradients()
        self.micro_steps = 0
        self.catch_up_all()

    def _verdict(self, units: Mapping[int, frozenset[int]]) -> float | None:
        """The factor that brings the global norm down to ``max_grad_norm``; ``None``: no step is
        to be taken.

        A norm that is not finite ends the step before anything has changed: once updates run in
        the background it would be too late to say so.
        """
        if not self.judges:
            return 1.0
        self._executor.request(Settled)
        indices = [i for present in units.values() for i in present]
        total = self._updater.total_norm(indices)
        if not math.isfinite(total):
            bad = [i for i in indices if not math.isfinite(self._updater.total_norm([i]))]
            names = {self._residences.parts.unit_of[i]: None for i in bad}
            listed = ", ".join(self._residences.parts.units[unit].name for unit in sorted(names))
            if self._config.on_nonfinite == "rollback":
                self._back(f"gradients are not finite in {listed}")
                return None
            if self._config.on_nonfinite == "skip":
                log.warning("overspill: gradients are not finite in %s; no step is taken", listed)
                self.micro_steps = 0
                return None
            raise OffloadError(
                f"gradients are not finite in {listed}; no weight was changed; lower the learning "
                "rate, or look for the first loss that is not finite"
            )
        limit = self._config.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (total + 1e-6))

    def _announce(self, units: Mapping[int, frozenset[int]], scale: float) -> None:
        for unit, present in units.items():
            if unit not in self._early:
                if self._executor.accelerator.has_device_memory:
                    self.collector.mark_resident(unit)
                self._updater.present(unit, present, scale)
                self._versions[unit] += 1

    def _after(self, units: Mapping[int, frozenset[int]]) -> None:
        """Counts the step.  In the background, resident units are waited for when they are used;
        until then a stray read shows, as it does for units that are not there."""
        parts = self._residences.parts
        for unit, present in units.items():
            for index in present:
                self._updater.steps[index] += 1
            if self._residences.fixed[unit]:
                if self.background:
                    self._late.add(unit)
                    self._residences.suspend(unit)
                elif self._executor.accelerator.has_device_memory:
                    self._executor.wait_for(self._place_of(unit))
                for _, spec in parts.units[unit].params:
                    torch.autograd.graph.increment_version(parts.parameters[spec.index])
        self._early.clear()
        self.count += 1
        self.micro_steps = 0

    # -- before compute -------------------------------------------------------------------------

    def catch_up(self, unit: int) -> None:
        """Compute is about to use a unit: waits for the resident ones among its weights."""
        for member in self._residences.groups[unit]:
            if member in self._late:
                name = self._residences.parts.units[member].name
                self._executor.request(partial(Need, member), name)
                self._executor.tell(Release(member))
                if self._executor.accelerator.has_device_memory:
                    self._executor.wait_for(self._place_of(member))
                self._residences.resume(member)
                self._late.discard(member)

    def catch_up_all(self) -> None:
        """Waits for every resident unit, so that parameters show their weights."""
        for unit in sorted(self._late):
            self.catch_up(unit)
