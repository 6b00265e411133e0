"""The units that a backward pass has open, and the start and end of backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..facts.trace import Trace
from ..private import torch_private
from .onloaded_units import OnloadedUnits


class Backward:
    """The state of backward passes: their graph tasks, and the unit that is open, one at a time.

    With reentrant checkpointing, graph tasks nest: the pass has ended when none is open any more.
    """

    def __init__(self, onloaded_units: OnloadedUnits, trace: Trace) -> None:
        self._onloaded_units, self._trace = onloaded_units, trace
        self._units: list[int] = []
        self._tasks: set[int] = set()
        self._begun: list[Callable[[], None]] = []
        self._over: list[Callable[[], None]] = []
        self._left: list[Callable[[int], None]] = []
        self.abandoning = False  # a backward that raised is being ended

    def when_begun(self, told: Callable[[], None]) -> None:
        """Call ``told`` when the first graph task has begun.

        Graphs still notice changes to weights that ``told`` makes.
        """
        self._begun.append(told)

    def when_over(self, told: Callable[[], None]) -> None:
        """Call ``told`` when the last open graph task has ended."""
        self._over.append(told)

    def when_left(self, told: Callable[[int], None]) -> None:
        """Call ``told`` with each unit that backward has released to go on with another one."""
        self._left.append(told)

    def opened(self) -> None:
        """Record that a graph task is running, and ask autograd to report its end."""
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

    @property
    def running(self) -> bool:
        """Whether a backward pass has begun and was not ended, maybe because it raised."""
        return bool(self._tasks)

    def enter(self, unit: int) -> None:
        """Onload ``unit``, which backward has reached, and release the units before it.

        Nothing changes if a unit is open that ``unit`` is onloaded with.
        """
        self.opened()
        if any(unit in self._onloaded_units.groups[each] for each in self._units):
            return
        self._let_go()
        self._onloaded_units.enter(unit, visible=False)  # see Note [Visible parameters]
        self._units.append(unit)

    def recomputes(self, unit: int) -> None:
        """Release the other units before a checkpoint runs the forward of ``unit`` again.

        Otherwise more of them would be open than a forward or a backward needs.
        """
        self._let_go(but=unit)

    def leave(self, unit: int) -> None:
        """Release ``unit``, whose gradients are all there: backward needs its weights no longer."""
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
        """Finish a backward that an exception ended without a callback."""
        if self._tasks or self._units:
            self.abandoning = bool(self._tasks)
            try:
                self._tasks.clear()
                self._finish()
            finally:
                self.abandoning = False


def _tell(listeners: Sequence[Callable[[], None]]) -> None:
    for told in listeners:
        told()
