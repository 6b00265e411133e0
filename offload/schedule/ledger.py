"""What is true of every parameter and of the step, besides where bytes are: one owner.

A step is taken all at once: what it changes is prepared, and made true when the machine takes the
step, on the machine's thread.  No signal interrupts that thread, so an exception in the middle of
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

    ``present``: by unit, the parameters that have a gradient.  ``scale``: multiplies them all.
    ``commits``: what the step leaves is to be committed.  ``random``: the states of the random
    generators at its end.
    """

    present: Mapping[int, frozenset[int]]
    scale: float
    commits: bool
    random: Mapping[str, Any] = field(repr=False)


class Ledger:
    """Counts, versions, norms and scales; by parameter, or by unit where it says so.

    ``steps``: taken so far.  ``versions``: by unit, how often its weights have changed.
    ``squares``: sums of squares of the gradients as they arrived; ``scales``: what multiplies them
    since.  ``measures``: the former are taken as gradients arrive.  ``early``: units that this
    step's backward has updated already.  ``spoiled``: units that hold values that are not finite;
    ``nonfinite``: those whose updates gave such, until somebody was told.  ``count``: whole steps.
    ``returns``: how often a commit took their place.  ``changing``: parameters that their modules
    have changed in forward.
    """

    def __init__(
        self, parameters: int, units: int, *, measures: bool = False, on_trial: bool = False
    ) -> None:
        """``on_trial``: norms are taken in the first step, in case that somebody asks for them."""
        self.steps = [0] * parameters
        self.versions = [0] * units
        self.squares: dict[int, float] = {}
        self.scales: dict[int, float] = {}
        self.early: set[int] = set()
        self.changing: set[int] = set()
        self.spoiled: set[int] = set()
        self.nonfinite: list[int] = []
        self.measures, self._on_trial = measures or on_trial, on_trial and not measures
        self.count = self.micro_steps = self.returns = 0
        self.next: Prepared | None = None
        # The global norm, from every rank's sum of squares, where a model is spread over several.
        self.over_ranks: Callable[[float], float] | None = None
        self._present: dict[int, dict[int, tuple[int, float]]] = {}
        self._listeners: list[weakref.WeakMethod[Callable[[Prepared], None]]] = []

    # -- gradients ------------------------------------------------------------------------------

    def ask_norms(self) -> None:
        """Somebody looks at norms: they are taken from now on."""
        self.measures, self._on_trial = True, False

    def renew(self, parameter: int) -> None:
        """Another gradient takes the place of the one that was there: its norm and scale go."""
        self.scales.pop(parameter, None)
        self.squares.pop(parameter, None)

    def forget_gradients(self) -> None:
        """All gradients are dropped."""
        self.squares.clear()
        self.scales.clear()

    def total_norm(self, parameters: Sequence[int]) -> float:
        """The L2 norm of gradients, summed exactly in the order of the parameters."""
        return math.sqrt(self._sum_of_squares(parameters))

    def _sum_of_squares(self, parameters: Sequence[int]) -> float:
        squares = [self.squares[i] * self.scales.get(i, 1.0) ** 2 for i in sorted(parameters)]
        finite = all(math.isfinite(square) for square in squares)
        return math.fsum(squares) if finite else sum(squares)

    def global_norm(self, parameters: Sequence[int]) -> float:
        """The same over all ranks, where there are several; each of them asks for it."""
        if self.over_ranks is None:
            return self.total_norm(parameters)
        return self.over_ranks(self._sum_of_squares(parameters))

    def any_nonfinite(self) -> bool:
        """Whether updates gave values that are not finite, on any rank; each of them asks."""
        mine = bool(self.nonfinite)
        return mine if self.over_ranks is None else self.over_ranks(float(mine)) > 0

    # -- the step -------------------------------------------------------------------------------

    def begin_early(self, unit: int, parameters: Collection[int]) -> None:
        """Backward updates a unit before the step is taken."""
        self._announce(unit, parameters, 1.0)
        self.early.add(unit)  # last: who finds it here finds the turns of its parameters too

    def _announce(self, unit: int, parameters: Collection[int], scale: float) -> None:
        self.versions[unit] += 1
        self._present[unit] = {
            i: (self.steps[i] + 1, scale * self.scales.get(i, 1.0)) for i in parameters
        }

    def turns(self, unit: int) -> Mapping[int, tuple[int, float]]:
        """Of the parameters of a unit that are updated: which step of theirs it is, and what
        multiplies their gradients."""
        return self._present[unit]

    def when_taken(self, listener: Callable[[Prepared], None]) -> None:
        """Has ``listener``, a method, told of every step, on the machine's thread; to be quick.  It
        is not kept alive: a thread that runs would keep all of the model."""
        self._listeners.append(weakref.WeakMethod(listener))

    def told(self, signal: Signal) -> None:
        """The machine is about to take a signal; called on its thread."""
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
        """The step that was prepared is taken."""
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
        """All updates of the last step are over."""
        self._present.clear()

    def give_up(self) -> None:
        """A step that was begun is not taken; its updates are over."""
        self.early.clear()
        self.nonfinite.clear()
        self.micro_steps = 0
        self.landed()

    def restore(self, count: int, steps: Sequence[int]) -> None:
        """Goes back to what a commit says."""
        self.count, self.steps[:] = count, steps
        self.returns += 1
