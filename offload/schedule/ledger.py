"""The step state: what is true of each parameter and of the step, apart from where bytes are.

A step is taken atomically: its changes are prepared, and applied on the machine's thread when the
machine processes ``Step``.  No OS signal interrupts that thread, so an exception in the middle of
``step()`` leaves either no step or a whole one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .messages import FiniteCheck, Rollback, Signal, Step


@dataclass(frozen=True)
class Prepared:
    """A step that is about to be taken.

    Attributes:
        present: by unit, the parameters that have a gradient.
        scale: factor for all gradients.
        commits: whether to commit the state after the step.
        random: the states of the random generators at its end.
        groups: by param group, the values that the optimizer has set in it.
    """

    present: Mapping[int, frozenset[int]]
    scale: float
    commits: bool
    random: Mapping[str, Any] = field(repr=False)
    groups: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False)


class Ledger:
    """The owner of the step state.

    Attributes:
        steps: by parameter, steps taken so far.
        versions: by unit, how often its weights have changed.
        updates: by unit, how often the optimizer has updated it.
        edits: by parameter, how often its weight has changed otherwise.
        squares: by parameter, the sum of squares of its gradient as it arrived.
        scales: by parameter, the factor applied to its gradient since.
        measures: whether ``squares`` are computed as gradients arrive.
        early: units that the backward of the current step has updated already.
        changing: parameters that their modules have changed in forward.
        spoiled: units that hold non-finite values.
        nonfinite: units whose updates produced non-finite values, until that is reported.
        count: whole steps taken.
        returns: how often a commit was restored.
        next: the step that is about to be taken, if any.
        over_ranks: returns the L2 norm over all ranks, given this rank's sum of squares; ``None``
            for a model that is not sharded.
    """

    def __init__(
        self, parameters: int, units: int, *, measures: bool = False, on_trial: bool = False
    ) -> None:
        """``on_trial``: compute norms in the first step, in case the caller asks for them."""
        self.steps = [0] * parameters
        self.versions = [0] * units
        self.updates = [0] * units
        self.edits = [0] * parameters
        self.squares: dict[int, float] = {}
        self.scales: dict[int, float] = {}
        self.early: set[int] = set()
        self.changing: set[int] = set()
        self.spoiled: set[int] = set()
        self.nonfinite: list[int] = []
        self.measures, self._on_trial = measures or on_trial, on_trial and not measures
        self.count = self.micro_steps = self.returns = 0
        self.next: Prepared | None = None
        self.over_ranks: Callable[[float], float] | None = None
        self.copies: Mapping[int, int] = {}
        self._present: dict[int, dict[int, tuple[int, float]]] = {}
        self._listeners: list[weakref.WeakMethod[Callable[[Prepared], None]]] = []

    # -- gradients ------------------------------------------------------------------------------

    def ask_norms(self) -> None:
        """Start to measure norms, since the caller uses them."""
        self.measures, self._on_trial = True, False

    def renew(self, parameter: int) -> None:
        """Drop the norm and scale of a gradient that is replaced by another one."""
        self.scales.pop(parameter, None)
        self.squares.pop(parameter, None)

    def forget_gradients(self) -> None:
        """Drop the norms and scales of all gradients."""
        self.squares.clear()
        self.scales.clear()

    def total_norm(self, parameters: Sequence[int]) -> float:
        """Return the L2 norm of gradients, summed exactly in the order of the parameters."""
        return math.sqrt(self._sum_of_squares(parameters))

    def _sum_of_squares(self, parameters: Sequence[int]) -> float:
        squares = [
            self.squares[i] * self.scales.get(i, 1.0) ** 2 / self.copies.get(i, 1)
            for i in sorted(parameters)
        ]
        finite = all(math.isfinite(square) for square in squares)
        return math.fsum(squares) if finite else sum(squares)

    def global_norm(self, parameters: Sequence[int]) -> float:
        """Return the L2 norm over all ranks.  Collective: every rank must call it."""
        if self.over_ranks is None:
            return self.total_norm(parameters)
        return self.over_ranks(self._sum_of_squares(parameters))

    def any_nonfinite(self) -> bool:
        """Return whether updates produced non-finite values on any rank.  Collective."""
        mine = bool(self.nonfinite)
        return mine if self.over_ranks is None else self.over_ranks(float(mine)) > 0

    # -- the step -------------------------------------------------------------------------------

    def begin_early(self, unit: int, parameters: Collection[int]) -> None:
        """Record that backward updates a unit before the step is taken."""
        self._announce(unit, parameters, 1.0)
        self.early.add(unit)  # last, so that readers of ``early`` find the turns too

    def _announce(self, unit: int, parameters: Collection[int], scale: float) -> None:
        self.versions[unit] += 1
        self.updates[unit] += 1
        self._present[unit] = {
            i: (self.steps[i] + 1, scale * self.scales.get(i, 1.0)) for i in parameters
        }

    def turns(self, unit: int) -> Mapping[int, tuple[int, float]]:
        """Return, for the parameters of a unit that are updated, the number of the step for each
        parameter and the factor for its gradient."""
        return self._present[unit]

    def when_taken(self, listener: Callable[[Prepared], None]) -> None:
        """Call ``listener``, a bound method, for every step, on the machine's thread.

        It must return quickly.  Only a weak reference is kept: otherwise the running thread would
        keep the whole model alive.
        """
        self._listeners.append(weakref.WeakMethod(listener))

    def told(self, signal: Signal) -> None:
        """Apply a signal that the machine is about to process.  Called on its thread."""
        if isinstance(signal, Step) and signal.counts:
            self._take()
        elif isinstance(signal, FiniteCheck):
            if signal.finite:
                self.spoiled.discard(signal.unit)
            else:
                self.spoiled.add(signal.unit)
        elif isinstance(signal, Rollback):
            self.spoiled.clear()

    def _take(self) -> None:
        """Take the prepared step."""
        prepared, self.next = self.next, None
        assert prepared is not None
        for unit, parameters in prepared.present.items():
            if unit not in self.early:
                self._announce(unit, parameters, prepared.scale)
            for index in parameters:
                self.steps[index] += 1
        self.early.clear()
        if self._on_trial:
            self.measures = self._on_trial = False
        self.count += 1
        self.micro_steps = 0
        for reference in self._listeners:
            if (listener := reference()) is not None:
                listener(prepared)

    def landed(self) -> None:
        """Forget the last step's counts and factors, since all its updates are over."""
        self._present.clear()

    def give_up(self) -> None:
        """Abandon a step that was begun, once its updates are over."""
        self.early.clear()
        self.nonfinite.clear()
        self.micro_steps = 0
        self.landed()

    def restore(self, count: int, steps: Sequence[int]) -> None:
        """Restore the step counts of a commit."""
        self.count, self.steps[:] = count, steps
        self.returns += 1
