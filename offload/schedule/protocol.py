"""The order of signals that make up a step, its commit, an edit and the way back: written once.

Whoever computes follows it: the training thread, the simulator, the drawn machines of the tests.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from .arena import Place
from .layout import Layout
from .messages import (
    AbortCommit,
    Await,
    AwaitUpdate,
    Cut,
    ExpertsRouted,
    GradReady,
    GradRoom,
    Grant,
    Key,
    Need,
    Repeat,
    Restored,
    Rollback,
    Seal,
    Signal,
    Step,
    Until,
)


class Ask(typing.Protocol):
    """Sends the signal that ``make`` builds from a ticket; returns its grant, once it has come.
    ``computing``: what compute then goes on with."""

    def __call__(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant: ...


class Protocol:
    """One machine's, from the side of compute.

    Attributes:
        landing: whether the updates of the last step may still run.
        open: there is a cut, or the very first is to be made, whose facts are not known yet.
        cut: the machine has, or will have, a cut of the last step.
    """

    def __init__(
        self, layout: Layout, ask: Ask, tell: Callable[[Signal], None],
        landed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            tell: sends a signal, and goes on.
            landed: called when the updates of a step are known to be over.
        """
        self._ask, self._tell, self._landed = ask, tell, landed
        self._names = [unit.name for unit in layout.units]
        self._groups = layout.together
        self._resident = [home.resident for home in layout.homes]
        self._behind: set[int] = set()  # units with an update that nobody has waited for
        self.updates_pending = self.cut = False
        self._arriving = False  # gradients that nobody has waited for may be on their way
        self.open = layout.durable

    def told(self, signal: Signal) -> None:
        """The machine is about to take a signal; may be called on a thread of its own."""
        if isinstance(signal, Step) and signal.counts:
            self.open = self.cut = signal.commit

    def wait(self, until: Until) -> None:
        """Returns when that is so."""
        self._ask(lambda ticket: Await(until, ticket))

    # -- compute --------------------------------------------------------------------------------

    def catch_up(self, unit: int) -> None:
        """Compute is about to use a unit: waits for updates of what stays where it is."""
        for member in self._groups[unit]:
            if self._resident[member] and member in self._behind:
                self._ask(partial(AwaitUpdate, member), self._names[member])
                self._behind.discard(member)

    def need(self, unit: int) -> tuple[Place, ...]:
        """Has a unit brought to compute, until ``Release``; where its group is."""
        return self._ask(partial(Need, unit), self._names[unit]).places

    def chosen(self, among: Sequence[int], likely: Collection[int], *, now: bool) -> None:
        """Which of some units compute will use; see ``ExpertsRouted``."""
        self._tell(ExpertsRouted(tuple(among), frozenset(likely), now))

    def room(self, unit: int, *, merge: bool) -> Place:
        """Where to gather the gradients of a unit; see ``GradRoom``."""
        (place,) = self._ask(lambda ticket: GradRoom(unit, ticket, merge)).places
        return place

    def gathered(self, unit: int, *, merge: bool, update: bool, in_place: bool) -> None:
        """The gradients of a unit are where they were to be gathered; see ``GradReady``."""
        if update:
            self._behind.add(unit)
        self._arriving = True
        self._tell(GradReady(unit, merge, update, in_place))

    # -- the step -------------------------------------------------------------------------------

    def await_gradients(self) -> None:
        """Waits until all gradients have arrived.  Who looks at one after the other waits once."""
        if self._arriving:
            self.wait(Until.ARRIVED)
            self._arriving = False

    def finish_updates(self) -> None:
        """Waits until the last step's updates are over.  Before the first update of the next: a
        backward updates no unit while the step before has not landed."""
        if self.updates_pending:
            self.wait(Until.LANDED)
            self.updates_pending = False
            self._behind.clear()
            self._landed()

    def step(self, units: Sequence[int], *, background: bool, commit: bool) -> None:
        """Takes a step; returns when all of it is over, or at once in the background."""
        # From here on it may be taken, whatever is raised: only the machine can tell.
        self.updates_pending = True
        self._behind.update(units)
        self._ask(lambda ticket: Step(tuple(units), ticket, background, commit))

    def give_up(self, *, begun: bool) -> None:
        """Ends a step that is not to be taken; ``begun``: a backward has updated units."""
        if begun:
            self._ask(lambda ticket: Step((), ticket, counts=False))
        self.updates_pending = True
        self.finish_updates()

    def forward_again(self) -> None:
        """Where nothing is trained: all units are about to be used in the order of the last time,
        and then in that order again."""
        self._tell(Repeat())

    # -- commits --------------------------------------------------------------------------------

    def seal(self, number: int, *, always: bool = True) -> None:
        """The facts of the present state are known, under ``number``: they are those of the last
        step's cut, if that lacks them; else what is current is committed with them, if not
        ``always``, then only if it is newer than the last commit."""
        # Told first: facts that are told twice do no harm, a cut without any waits for ever.
        self._tell(Seal(number) if self.open and self.cut else Cut(number, always))
        self.open = False

    def begin_edit(self) -> None:
        """Weights and state are about to be edited: that belongs to the state after the last step.
        Its cut is taken back, to be made anew when its facts are known; if they are known already,
        it is waited for.  From then on nothing moves."""
        self.wait(Until.QUIET)
        if self.open and self.cut:
            self._tell(AbortCommit())
            self.cut = False
        elif not self.open:
            self.wait(Until.DURABLE)
            self.wait(Until.QUIET)

    def roll_back(self, restore: Callable[[Iterable[Key]], int]) -> None:
        """Goes back to the last commit; whatever was begun is given up.

        ``restore`` reads again what it is given, and returns the number of the facts that hold
        now.
        """
        self.open = self.cut = False
        self.wait(Until.QUIET)
        number = restore(self._ask(Rollback).items)
        self._tell(Restored())
        self._tell(Cut(number))
        self.wait(Until.DURABLE)
