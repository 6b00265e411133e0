"""Which resident weights show: between uses none does, so that whoever reads or changes one is
seen."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from ..errors import OffloadError
from ..movement.executor import Executor
from ..schedule.ledger import Ledger
from .onloaded_units import OnloadedUnits
from .torch_private import in_backward


class ResidentParamGuard:
    """Between steps no resident weight shows: it is *late* until compute catches up with its
    update.  A unit that backward has updated is late at once, so that a forward before ``step()``
    sees the same weights whether they are streamed or resident: the updated ones.
    """

    def __init__(self, onloaded_units: OnloadedUnits, executor: Executor, ledger: Ledger) -> None:
        self._onloaded_units, self._protocol, self._ledger = (
            onloaded_units,
            executor.protocol,
            ledger,
        )
        self._late: set[int] = set()  # resident units that do not show, in part at least
        self._suspended: set[int] = set()  # those of them that are wholly hidden

    def name_of(self, unit: int) -> str:
        """The unit's name."""
        return self._onloaded_units.parts.units[unit].name

    # -- hiding and showing ---------------------------------------------------------------------

    def hide_all(self) -> None:
        """No resident weight shows before it is used again: whoever reads or changes one is
        seen."""
        self._hide(range(len(self._onloaded_units.fixed)))

    @property
    def hidden(self) -> Collection[int]:
        """Resident units that do not show."""
        return self._late

    def changed(self, unit: int, params: Container[int]) -> None:
        """Weights of a unit were replaced: graphs that have saved the old ones are told."""
        self._ledger.versions[unit] += 1
        self._onloaded_units.outdate(unit, params)

    def refuse_edit(self, unit: int) -> None:
        """Raises when weights are to be changed that this step's backward has updated already."""
        if unit in self._ledger.early:
            raise OffloadError(
                f"weights of {self.name_of(unit)!r} cannot be changed now: update='backward' has "
                "updated them in a step that is not taken yet; change them between step() and the "
                "next backward()"
            )

    def _hide(self, units: Iterable[int]) -> None:
        """Resident units among ``units`` no longer show.  An exception in between leaves nothing
        hidden for good, or half hidden when it is hidden again."""
        for unit in units:
            if self._onloaded_units.fixed[unit] and unit not in self._suspended:
                self._late.add(unit)
                self._onloaded_units.suspend(unit)
                self._suspended.add(unit)

    def end_graphs(self, units: Sequence[int]) -> None:
        """Units are about to be updated."""
        self._hide(units)
        for unit in units:
            self._onloaded_units.outdate(unit)

    def show(self, unit: int) -> None:
        """Compute is about to use a unit: waits for the resident ones among its weights."""
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
        """Raises when a backward comes to weights again that it has updated: a checkpoint would
        compute with others than forward did."""
        for member in self._onloaded_units.groups[unit]:
            if member in self._ledger.early:
                raise OffloadError(
                    f"update='backward' has updated {self.name_of(member)!r} in this backward, "
                    "which now uses its weights again (a checkpoint computes it once more, or a "
                    "hook reads them); use update='next_forward'"
                )

    # No block: what ends one may be run by the collector, when all was tidied up long ago.

    def begin_reading(self, unit: int) -> list[int]:
        """From now on the weights of a unit show and are current, for whoever reads them; gives
        what ``end_reading`` is to be told."""
        hidden = [m for m in self._onloaded_units.groups[unit] if m in self._late]
        self.show(unit)
        self._onloaded_units.enter(unit)
        return hidden

    def end_reading(self, unit: int, hidden: list[int]) -> None:
        """They show no more, if they did not before."""
        self._onloaded_units.leave(unit, keep=not in_backward())  # there one unit is open at a time
        self._hide(hidden)
