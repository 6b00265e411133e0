"""Which units a backward pass has open, and when a backward pass is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..facts.trace import Trace
from . import torch_private
from .onloaded_units import OnloadedUnits


class Backward:
    """Keeps one unit open at a time; tells of the first graph task's begin and the last one's end.

    With reentrant checkpointing, graph tasks nest: the pass is over when none is open any more.
    """

    def __init__(self, onloaded_units: OnloadedUnits, trace: Trace) -> None:
        self._onloaded_units, self._trace = onloaded_units, trace
        self._units: list[int] = []
        self._tasks: set[int] = set()
        self._begun: list[Callable[[], None]] = []
        self._over: list[Callable[[], None]] = []
        self._left: list[Callable[[int], None]] = []

    def when_begun(self, told: Callable[[], None]) -> None:
        """``told`` is called when the first graph task has begun: what was changed by then in
        weights is told to the graphs."""
        self._begun.append(told)

    def when_over(self, told: Callable[[], None]) -> None:
        """``told`` is called when the last open graph task has ended."""
        self._over.append(told)

    def when_left(self, told: Callable[[int], None]) -> None:
        """``told`` is called with each unit that backward has let go to go on with another."""
        self._left.append(told)

    def opened(self) -> None:
        """A graph task is running: makes sure to hear of its end."""
        task = torch_private.current_graph_task()
        if not self._trace.computing:
            self._trace.compute_resume("backward")
        if task >= 0 and task not in self._tasks:
            if not self._tasks:
                _tell(self._begun)
            self._tasks.add(task)
            torch_private.at_end_of_backward(lambda: self._closed(task))

    def _closed(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._finish()

    def enter(self, unit: int) -> None:
        """Backward has come to ``unit``; the ones before it are let go, but not one that this one
        comes with."""
        self.opened()
        if any(unit in self._onloaded_units.groups[each] for each in self._units):
            return
        self._let_go()
        self._onloaded_units.enter(unit, visible=False)  # see Note [Visible parameters]
        self._units.append(unit)

    def recomputes(self, unit: int) -> None:
        """A checkpoint is about to run the forward of ``unit`` again: the others are let go, else
        more of them would be open than a forward or a backward needs."""
        self._let_go(but=unit)

    def leave(self, unit: int) -> None:
        """All gradients of ``unit`` are there: its weights are of no more use."""
        if unit in self._units:
            self._units.remove(unit)
            self._onloaded_units.leave(unit, visible=False)

    def _let_go(self, but: int | None = None) -> None:
        for unit in [each for each in self._units if each != but]:
            self.leave(unit)
            for told in self._left:
                told(unit)

    def _finish(self) -> None:
        while self._units:
            self._onloaded_units.leave(self._units.pop(), visible=False)
        _tell(self._over)

    def abandon(self) -> None:
        """An exception ended the last backward without a word."""
        if self._tasks or self._units:
            self._tasks.clear()
            self._finish()


def _tell(listeners: Sequence[Callable[[], None]]) -> None:
    for told in listeners:
        told()
