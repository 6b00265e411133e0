"""The optimizer step: which units are updated when, in every update mode."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ..config import OffloadConfig
from ..errors import OffloadError
from ..movement.executor import Executor
from ..movement.updates import Updater
from ..schedule.ledger import Ledger, Prepared
from .backward import Backward
from .gradients import GradientCollector
from .residences import Residences
from .saved import SavedTensors
from .torch_private import in_backward

log = logging.getLogger("overspill")


class Commits(Protocol):
    """Who is told of steps where they are committed."""

    def seal(self) -> None: ...

    def wanted(self, count: int) -> bool: ...

    def rollback(self) -> object: ...


class Stepping:
    """Decides between ``step`` (all inside ``step()``), ``backward`` (a unit as soon as its
    gradients are there) and ``next_forward`` (behind the next forward, unit by unit).

    Between steps no resident weight shows: it is *late* until compute catches up with its update.
    A unit that backward has updated is late at once, so that a forward before ``step()`` sees the
    same weights whether they are streamed or resident: the updated ones.
    """

    collector: GradientCollector  # set when the model is hooked up
    committing: Commits | None = None

    def __init__(
        self,
        config: OffloadConfig,
        update: str,
        groups: Sequence[Mapping[str, Any]],
        ledger: Ledger,
        executor: Executor,
        updater: Updater,
        residences: Residences,
        saved: SavedTensors,
        backward: Backward,
        random_states: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._config, self.update, self._groups = config, update, groups
        self._ledger, self._executor, self._updater = ledger, executor, updater
        self._residences, self._saved, self._backward = residences, saved, backward
        self._protocol, self._random_states = executor.protocol, random_states
        self.background = update != "step"
        self._partly_frozen = {
            u.index
            for u in residences.parts.units
            if residences.fixed[u.index]
            and executor.accelerator.has_device_memory
            and any(chunk.group is None for chunk in u.chunks)
        }
        self._late: set[int] = set()  # resident units that do not show, in part at least
        self._suspended: set[int] = set()  # those of them that are wholly hidden
        self._told_of_dropped = False
        self._final: bool | None = None

    # -- during backward ------------------------------------------------------------------------

    def may_update(self, unit: int, over: bool) -> bool:
        """Whether a unit may be updated now, its gradients being gathered; ``over``: no backward
        runs any more, so that a graph that is still there is in nobody's way."""
        final = self._final
        if final is None:
            final = self._ledger.micro_steps == self._config.accumulate - 1
        if self.update != "backward" or not final:
            return False
        if unit in self._partly_frozen and not over:
            return False  # backward may come to the frozen part later, and all is copied in
        users = self._residences.users[unit]  # itself, and those that share its weights
        return over or not any(self._saved.live[u] or self._residences.uses[u] for u in users)

    def begin_early(self, unit: int, params: Sequence[int]) -> None:
        """Backward is about to have a unit updated, whose ``params`` have a gradient."""
        if self.committing is not None:
            self.committing.seal()
        self.land()
        if not self._ledger.early:
            self._updater.begin_step(self._groups)
        self._ledger.begin_early(unit, params)
        self.collector.consumed.update(params)
        self._end_graphs([unit])

    def refuse_consumed(self, params: Collection[int]) -> None:
        """Raises when backward has used up the gradient of one of the parameters."""
        if not self.collector.consumed.isdisjoint(params):
            raise OffloadError(
                "update='backward' has applied this gradient already; for several backward() per "
                "step set accumulate=N or use overspill.accumulate(optimizer, final=...), or use "
                "update='next_forward' to use gradients between backward and step"
            )

    def _refuse_dropped(self) -> None:
        """Raises when gradients were dropped that this step's backward has applied already."""
        dropped = [
            unit
            for unit in sorted(self._ledger.early)
            if any(
                i in self.collector.consumed and not self.collector.live(i)
                for i in self._ledger.turns(unit)
            )
        ]
        if dropped and not self._told_of_dropped:
            self._told_of_dropped = True
            raise OffloadError(
                f"update='backward' has applied the gradients of "
                f"{', '.join(map(self.name_of, dropped))} already, and they were dropped "
                "before step(); call step() before zero_grad(), or use update='next_forward'; "
                "another step() takes the step as it is, rollback() goes back to the last commit"
            )
        self._told_of_dropped = False

    def refuse_edit(self, unit: int) -> None:
        """Raises when weights are to be changed that this step's backward has updated already."""
        if unit in self._ledger.early:
            name = self._residences.parts.units[unit].name
            raise OffloadError(
                f"weights of {name!r} cannot be changed now: update='backward' has updated them in "
                "a step that is not taken yet; change them between step() and the next backward()"
            )

    def refuse_updated(self, unit: int) -> None:
        """Raises when a gradient comes for a unit that this step's backward has updated already."""
        if unit in self._ledger.early:
            name = self._residences.parts.units[unit].name
            raise OffloadError(
                f"update='backward' has updated {name!r} already in this step, with the gradients "
                "of the backward before, or of this one where a module that is used twice lies in "
                "reentrant checkpoints; call step() after it, also where that batch is to be left "
                "out (or optimizer.rollback(), with a store), or use update='next_forward'"
            )

    def backward_over(self) -> None:
        """The outermost backward pass has ended."""
        self._ledger.micro_steps += 1

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
        """Updates every parameter that has a gradient; in the background, if so set.

        An exception at any point leaves no step or a whole one: until the machine is told of it,
        nothing has changed but which resident weights show.
        """
        self._backward.abandon()
        if self.committing is not None:
            self.committing.seal()
        with self._all_final():
            self.collector.take_user_grads()
        self._refuse_changed_groups()
        if not self._ledger.early:
            self.land()
        if self._updater.nonfinite:
            if self._config.on_nonfinite == "rollback":
                self._back("the last update gave values that are not finite")
                return
            self._updater.raise_nonfinite()
        self._residences.check_shown(self._late)
        units = {
            unit.index: present
            for unit in self._residences.parts.units
            if (present := self.collector.present(unit.index))
        }
        for unit, present in units.items():
            self.collector.refuse_torn(present)
            if unit not in self._ledger.early:
                self.refuse_consumed(present)
        self._refuse_dropped()
        scale = self._verdict(units)
        if scale is None:
            return
        self._take(units, scale)
        self.hide_all()  # what was shown where parts of the model were called
        if not self.background:
            self.land()

    def _take(self, units: Mapping[int, frozenset[int]], scale: float) -> None:
        ledger, committing = self._ledger, self.committing
        if not ledger.early:
            self._updater.begin_step(self._groups)
        later = [unit for unit in units if unit not in ledger.early]
        for unit in later:
            self.compute_over(unit)
        self._end_graphs(later)
        commits = committing is not None and committing.wanted(ledger.count + 1)
        random = {} if committing is None else self._random_states()
        ledger.next = Prepared(units, scale, commits, random)
        self._protocol.step(tuple(units), background=self.background, commit=commits)

    def _refuse_changed_groups(self) -> None:
        changed = self._updater.changed_since_begin(self._groups) if self._ledger.early else None
        if changed is not None:
            raise OffloadError(
                f"{changed!r} was changed after update='backward' had begun to apply it; change "
                "hyper-parameters between step() and the next backward()"
            )

    def land(self) -> None:
        """Waits until the last step's updates are over; raises what they found."""
        if self._protocol.landing:
            self._protocol.land()
            if self._config.on_nonfinite != "rollback":  # else the next step goes back
                self._updater.raise_nonfinite()

    def name_of(self, unit: int) -> str:
        """The unit's name."""
        return self._residences.parts.units[unit].name

    @property
    def partial(self) -> bool:
        """Whether a backward has updated units of a step that has not been taken."""
        return bool(self._ledger.early)

    def _back(self, why: str) -> None:
        assert self.committing is not None
        log.warning("overspill: %s; no step is taken", why)
        self.committing.rollback()

    def give_up(self) -> None:
        """Ends a step that has begun, and drops all gradients and what was not finite."""
        self._backward.abandon()
        self._protocol.give_up(begun=bool(self._ledger.early))
        self._ledger.give_up()
        self._updater.nonfinite.clear()
        self.collector.drop()
        self._ledger.forget_gradients()

    def _verdict(self, units: Mapping[int, frozenset[int]]) -> float | None:
        """The factor that brings the global norm down to ``max_grad_norm``; ``None``: no step is
        to be taken.

        A norm that is not finite ends the step before anything has changed: once updates run in
        the background it would be too late to say so.
        """
        if not judges(self._config, self.update):
            return 1.0
        self._protocol.settle()
        indices = [i for present in units.values() for i in present]
        total = self._ledger.total_norm(indices)
        if not math.isfinite(total):
            bad = [i for i in indices if not math.isfinite(self._ledger.total_norm([i]))]
            names = {self._residences.parts.unit_of[i]: None for i in bad}
            listed = ", ".join(self._residences.parts.units[unit].name for unit in sorted(names))
            if self._config.on_nonfinite == "rollback":
                self._back(f"gradients are not finite in {listed}")
                return None
            if self._config.on_nonfinite == "skip":
                log.warning("overspill: gradients are not finite in %s; no step is taken", listed)
                self._ledger.micro_steps = 0
                return None
            raise OffloadError(
                f"gradients are not finite in {listed}; no weight was changed; lower the learning "
                "rate, or look for the first loss that is not finite"
            )
        limit = self._config.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (total + 1e-6))

    # -- what shows -----------------------------------------------------------------------------

    def hide_all(self) -> None:
        """No resident weight shows before it is used again: whoever reads or changes one is
        seen."""
        self._hide(range(len(self._residences.fixed)))

    @property
    def hidden(self) -> Collection[int]:
        """Resident units that do not show."""
        return self._late

    def changed(self, unit: int, params: Container[int]) -> None:
        """Weights of a unit were replaced: graphs that have saved the old ones are told."""
        self._ledger.versions[unit] += 1
        self._residences.outdate(unit, params)

    def _hide(self, units: Iterable[int]) -> None:
        """Resident units among ``units`` no longer show.  An exception in between leaves nothing
        hidden for good, or half hidden when it is hidden again."""
        for unit in units:
            if self._residences.fixed[unit] and unit not in self._suspended:
                self._late.add(unit)
                self._residences.suspend(unit)
                self._suspended.add(unit)

    def compute_over(self, unit: int) -> None:
        """A unit's compute is over for now: its update waits for it."""
        self._residences.compute_over(unit)

    def _end_graphs(self, units: Sequence[int]) -> None:
        """Units are about to be updated."""
        self._hide(units)
        for unit in units:
            self._residences.outdate(unit)

    def show(self, unit: int) -> None:
        """Compute is about to use a unit: waits for the resident ones among its weights."""
        if in_backward():
            self._refuse_outdated(unit)
        self._protocol.catch_up(unit)
        for member in self._residences.groups[unit]:
            if member in self._late:
                self._residences.renewed(member)
                self._residences.use_here([member])
                self._suspended.discard(member)
                self._residences.resume(member)
                self._late.discard(member)
            elif self._residences.fixed[member]:
                self._residences.use_here([member])

    def _refuse_outdated(self, unit: int) -> None:
        """Raises when a backward comes to weights again that it has updated: a checkpoint would
        compute with others than forward did."""
        for member in self._residences.groups[unit]:
            if member in self._ledger.early:
                raise OffloadError(
                    f"update='backward' has updated {self.name_of(member)!r} in this backward, "
                    "which now uses its weights again (a checkpoint computes it once more, or a "
                    "hook reads them); use update='next_forward'"
                )

    @contextmanager
    def reading(self, unit: int) -> Iterator[None]:
        """Inside, the weights of a unit show and are current, for whoever reads them."""
        hidden = [m for m in self._residences.groups[unit] if m in self._late]
        self.show(unit)
        self._residences.enter(unit)
        try:
            yield
        finally:
            self._residences.leave(unit)
            self._hide(hidden)


def judges(config: OffloadConfig, update: str) -> bool:
    """Whether a step looks at the norms of all gradients before anything changes."""
    if update == "next_forward" or config.max_grad_norm is not None:
        return True
    return config.on_nonfinite != "raise" and update != "backward"
