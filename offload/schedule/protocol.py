"""The order of signals in a step, a commit, an edit and a rollback, written once.

The training thread, the simulator and the randomised tests all drive the residency machine with it.
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
    """A function that sends the signal that ``make`` builds from a ticket, and waits for its grant.

    ``computing``: the name of the unit that compute continues with.
    """

    def __call__(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant: ...


class Protocol:
    """The protocol of one residency machine, from the side of compute.

    Attributes:
        updates_pending: whether the updates of the last step may still run.
        open: whether a snapshot (or the very first, still to be made) lacks its metadata.
        cut: whether the machine has, or will have, a snapshot of the last step.
    """

    def __init__(
        self, layout: Layout, ask: Ask, tell: Callable[[Signal], None],
        landed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            ask: sends a signal and waits for its grant.
            tell: sends a signal without waiting.
            landed: called when the updates of a step are known to be over.
        """
        self._ask, self._tell, self._landed = ask, tell, landed
        self._names = [unit.name for unit in layout.units]
        self._groups = layout.together
        self._resident = [home.resident for home in layout.homes]
        self._behind: set[int] = set()  # units with an update that compute has not waited for
        self.updates_pending = self.cut = False
        self._arriving = False  # whether gradients may be on their way, not waited for yet
        self.open = layout.durable

    def told(self, signal: Signal) -> None:
        """Note that the machine is about to process a signal.  May be called on another thread."""
        if isinstance(signal, Step) and signal.counts:
            self.open = self.cut = signal.commit

    def wait(self, until: Until) -> None:
        """Wait until a condition holds."""
        self._ask(lambda ticket: Await(until, ticket))

    # -- compute --------------------------------------------------------------------------------

    def catch_up(self, unit: int) -> None:
        """Wait for pending updates of the resident weights that a unit uses."""
        for member in self._groups[unit]:
            if self._resident[member] and member in self._behind:
                self._ask(partial(AwaitUpdate, member), self._names[member])
                self._behind.discard(member)

    def need(self, unit: int) -> tuple[Place, ...]:
        """Onload a unit and its group until ``Release``; return their places."""
        return self._ask(partial(Need, unit), self._names[unit]).places

    def chosen(self, among: Sequence[int], likely: Collection[int], *, now: bool) -> None:
        """Announce which of some units compute will use; see ``ExpertsRouted``."""
        self._tell(ExpertsRouted(tuple(among), frozenset(likely), now))

    def room(self, unit: int, *, merge: bool) -> Place:
        """Return a place to gather the gradients of a unit in; see ``GradRoom``."""
        (place,) = self._ask(lambda ticket: GradRoom(unit, ticket, merge)).places
        return place

    def gathered(self, unit: int, *, merge: bool, update: bool, in_place: bool) -> None:
        """Hand over the gathered gradients of a unit; see ``GradReady``."""
        if update:
            self._behind.add(unit)
        self._arriving = True
        self._tell(GradReady(unit, merge, update, in_place))

    # -- the step -------------------------------------------------------------------------------

    def await_gradients(self) -> None:
        """Wait until all gradients have arrived.  Repeated calls wait only once."""
        if self._arriving:
            self.wait(Until.ARRIVED)
            self._arriving = False

    def finish_updates(self) -> None:
        """Wait until the last step's updates are over.

        Call it before the first update of the next step: a backward must not update a unit while
        updates of the previous step are pending.
        """
        if self.updates_pending:
            self.wait(Until.LANDED)
            self.updates_pending = False
            self._behind.clear()
            self._landed()

    def step(self, units: Sequence[int], *, background: bool, commit: bool) -> None:
        """Take a step; return when all of it is over, or at once if in the ``background``."""
        # From here on the step may be taken even if an exception is raised; only the machine knows.
        self.updates_pending = True
        self._behind.update(units)
        self._ask(lambda ticket: Step(tuple(units), ticket, background, commit))

    def give_up(self, *, begun: bool) -> None:
        """End a step without taking it; ``begun``: a backward has already updated units."""
        if begun:
            self._ask(lambda ticket: Step((), ticket, counts=False))
        self.updates_pending = True
        self.finish_updates()

    def forward_again(self) -> None:
        """Begin a forward without training: units are used in the same order as the last time."""
        self._tell(Repeat())

    # -- commits --------------------------------------------------------------------------------

    def seal(self, number: int, *, always: bool = True) -> None:
        """Supply the metadata ``number`` of the current state.

        If the last step's snapshot lacks its metadata, seal it.  Otherwise commit the current state
        with this metadata; unless ``always``, only if it is newer than the last commit.
        """
        # Send it before updating ``open``: sending twice is harmless, but a snapshot without
        # metadata would wait for ever.
        self._tell(Seal(number) if self.open and self.cut else Cut(number, always))
        self.open = False

    def begin_edit(self) -> None:
        """Prepare an edit of weights or state, which belongs to the state after the last step.

        If that step's snapshot lacks its metadata, give it up: the edited state is committed once
        the metadata is known.  If the metadata is known, wait for the commit.  Afterwards, nothing
        moves.
        """
        self.wait(Until.QUIET)
        if self.open and self.cut:
            self._tell(AbortCommit())
            self.cut = False
        elif not self.open:
            self.wait(Until.DURABLE)
            self.wait(Until.QUIET)

    def roll_back(self, restore: Callable[[Iterable[Key]], int]) -> None:
        """Go back to the last commit, and give up everything newer.

        Args:
            restore: reads the given items again, and returns the number of the metadata that is
                current now.
        """
        self.open = self.cut = False
        self.wait(Until.QUIET)
        number = restore(self._ask(Rollback).items)
        self._tell(Restored())
        self._tell(Cut(number))
        self.wait(Until.DURABLE)
