"""Hiding of resident weights between uses, so that reads and changes of them are noticed."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from ..errors import BackwardUpdateError
from ..movement.executor import Executor
from ..private.torch_private import in_backward
from ..schedule.ledger import Ledger
from .onloaded_units import OnloadedUnits

# Note [Resident weights between steps]
# The weights of a resident unit never move, and its parameters point at them all the time. But
# after each step the parameters are hidden like those of any other unit: their class is
# ``OffloadedParam``. So an operation on one first waits for the update of the weight, and a change
# to it is noticed. Such a unit is *late* until compute is about to use it: ``show`` waits for its
# update and shows it again.
#
# A unit that ``update="backward"`` has updated is late at once. So a forward before ``step()`` sees
# the updated weights, whether they are resident or streamed. Graphs that saved the weights
# themselves become invalid, since updates change the same memory: ``end_graphs`` increments their
# versions, and backward raises.


class ResidentParamGuard:
    """The resident units that are hidden; see Note [Resident weights between steps]."""

    def __init__(self, onloaded_units: OnloadedUnits, executor: Executor, ledger: Ledger) -> None:
        self._onloaded_units, self._protocol, self._ledger = (
            onloaded_units,
            executor.protocol,
            ledger,
        )
        self._late: set[int] = set()  # resident units that are hidden, at least in part
        self._suspended: set[int] = set()  # those of them that are hidden completely
        # Units that modules were prepared to read since the last event, and whether gradients were
        # enabled then.
        self.prepared: dict[int, bool] = {}

    def name_of(self, unit: int) -> str:
        """Return the unit's name."""
        return self._onloaded_units.parts.units[unit].name

    # -- hiding and showing ---------------------------------------------------------------------

    def hide_all(self) -> None:
        """Hide all resident weights until their next use, so that reads and changes are noticed."""
        self._hide(range(len(self._onloaded_units.fixed)))

    @property
    def hidden(self) -> Collection[int]:
        """The resident units that are hidden."""
        return self._late

    def changed(self, unit: int, params: Container[int]) -> None:
        """Invalidate graphs that saved old weights of a unit, some of which were replaced."""
        self._ledger.versions[unit] += 1
        for _, spec in self._onloaded_units.parts.units[unit].params:
            self._ledger.edits[spec.index] += spec.index in params
        self._onloaded_units.outdate(unit, params)

    def refuse_edit(self, unit: int) -> None:
        """Raise if weights are about to be changed that this step's backward has updated."""
        if unit in self._ledger.early:
            raise BackwardUpdateError(
                f"weights of {self.name_of(unit)!r} cannot be changed now: update='backward' has "
                "updated them in a step that is not taken yet; change them between step() and the "
                "next backward()"
            )

    def _hide(self, units: Iterable[int]) -> None:
        """Hide the resident units among ``units``.

        An exception in between leaves no unit hidden for good, and a second call completes it.
        """
        self.prepared.clear()
        for unit in units:
            if self._onloaded_units.fixed[unit] and unit not in self._suspended:
                self._late.add(unit)
                self._onloaded_units.suspend(unit)
                self._suspended.add(unit)

    def end_graphs(self, units: Sequence[int]) -> None:
        """Hide units that are about to be updated, and invalidate graphs of their weights."""
        self._hide(units)
        for unit in units:
            self._onloaded_units.outdate(unit)

    def show(self, unit: int) -> None:
        """Wait for the resident weights of a unit that compute is about to use, and show them."""
        if in_backward():
            self._refuse_outdated(unit)
        self._protocol.catch_up(unit)
        for member in self._onloaded_units.groups[unit]:
            if member in self._late:
                self._onloaded_units.renewed(member)
                self._onloaded_units.use_here([member])
                self._suspended.discard(member)
                self._onloaded_units.resume(member)
                self._late.discard(member)
            elif self._onloaded_units.fixed[member]:
                self._onloaded_units.use_here([member])

    def _refuse_outdated(self, unit: int) -> None:
        """Raise if backward uses weights again that it has already updated.

        A checkpoint would recompute with other weights than forward used.
        """
        for member in self._onloaded_units.groups[unit]:
            if member in self._ledger.early:
                raise BackwardUpdateError(
                    f"update='backward' has updated {self.name_of(member)!r} in this step, and "
                    "backward uses its weights again; for several backward() per step, set "
                    "accumulate=N; if a checkpoint computes it once more or a hook reads it, use "
                    "update='next_forward'"
                )

    # Not a context manager: a generator's ``finally`` may run late, during garbage collection.

    def begin_reading(self, unit: int) -> list[int]:
        """Show the current weights of a unit to a reader, and return what ``end_reading`` needs."""
        hidden = [m for m in self._onloaded_units.groups[unit] if m in self._late]
        self.show(unit)
        self._onloaded_units.enter(unit)
        return hidden

    def end_reading(self, unit: int, hidden: list[int]) -> None:
        """Hide the weights again that ``begin_reading`` has shown."""
        self._onloaded_units.leave(unit, keep=not in_backward())  # backward opens one at a time
        self._hide(hidden)
