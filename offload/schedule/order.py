"""The recorded order of uses, and the next use of every unit in it."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby

NEVER = 1 << 60


class Use(enum.Enum):
    """The purpose for which a unit's weights are needed."""

    COMPUTE = "compute"
    UPDATE = "update"

    __hash__ = object.__hash__  # Enum's own is slow, and uses are dict keys


class Order:
    """The order of uses recorded in the last step, which predicts the uses of the current one.

    Distances are counted from a cursor, and the recorded step repeats without end.  If the current
    step departs from the record, the cursor jumps to the next position where the use occurs.  If
    there is none, the cursor stays, and prefetch guesses badly until the step ends.  Only speed
    depends on this.

    Routed units (experts) are announced with ``expect`` and ``come_to``.  All units of such a group
    are in the record each time; the ones that are not expected are skipped.

    Args:
        longest: a step with more uses than this is treated as several steps.
        moving: by use and unit, whether weights may have to move for it.
    """

    def __init__(self, longest: int, moving: Mapping[Use, Sequence[bool]]) -> None:
        self._events: list[tuple[Use, int]] = []
        # By use and unit, where it is in the record.
        self._positions: dict[Use, dict[int, list[int]]] = {use: {} for use in Use}
        self._cursor = 0
        self._recording: list[tuple[Use, int]] = []
        self._longest, self._moving = longest, moving
        self._recorded_ahead: set[int] = set()  # announced units that were recorded before use
        self._unlikely: set[int] = set()
        self._moves: list[int] = []  # positions of the uses for which weights may move
        self._chosen: set[int] = set()  # units that were ever announced
        # Streamed units in the order in which compute needed them in the last step, without routed
        # ones (experts), and the position of the present step in that order.
        self._needed: list[int] = []
        self._needed_turn = 0
        self._last_needed: int | None = None

    def observe(self, use: Use, unit: int) -> None:
        """Record that a unit is used now."""
        event = (use, unit)
        if use is Use.COMPUTE and unit in self._recorded_ahead:
            self._recorded_ahead.discard(unit)
        elif self._recording and self._recording[-1] == event:
            return
        else:
            self._recording.append(event)
        if len(self._recording) >= self._longest:
            self.end_step()
        else:
            self._go_to(event, behind=True)

    def expect(self, among: Sequence[int], likely: Container[int]) -> None:
        """Expect that, of the units ``among``, compute will use only the ``likely`` ones."""
        self._chosen.update(among)
        self._unlikely.difference_update(among)
        self._unlikely.update(unit for unit in among if unit not in likely)

    def come_to(self, among: Sequence[int]) -> None:
        """Record that compute is about to use the expected ones of ``among``, in this order."""
        self._recording += [(Use.COMPUTE, unit) for unit in among]
        self._recorded_ahead.update(among)
        self._go_to((Use.COMPUTE, among[0]), behind=False)

    def advance_to(self, unit: int) -> bool:
        """Return whether the record predicts that compute needs this streamed unit next.

        Call it once whenever compute needs a unit.  For routed units it returns ``True``: their
        routers predict them.
        """
        if unit in self._chosen or unit == self._last_needed:
            return True
        self._last_needed = unit
        sequence, turn = self._needed, self._needed_turn
        for ahead in range(len(sequence)):
            if sequence[(turn + ahead) % len(sequence)] == unit:
                self._needed_turn = (turn + ahead + 1) % len(sequence)
                return ahead == 0
        return not sequence

    def _go_to(self, event: tuple[Use, int], *, behind: bool) -> None:
        ahead = self._ahead(*event)
        if ahead < NEVER:
            self._cursor = (self._cursor + ahead + behind) % len(self._events)

    def end_step(self) -> None:
        """End a step: what was recorded since the last end becomes the order of the next step."""
        self._events, self._recording, self._cursor = self._recording, [], 0
        self._recorded_ahead.clear()
        self._positions, self._moves = {use: {} for use in Use}, []
        for position, (use, unit) in enumerate(self._events):
            self._positions[use].setdefault(unit, []).append(position)
            if self._moving[use][unit]:
                self._moves.append(position)
        needed = (self._events[position] for position in self._moves)
        units = (unit for use, unit in needed if use is Use.COMPUTE and unit not in self._chosen)
        self._needed = [unit for unit, _ in groupby(units)]
        self._needed_turn, self._last_needed = 0, None

    def _ahead(self, use: Use, unit: int) -> int:
        positions = self._positions[use].get(unit)
        if not positions:
            return NEVER
        at = bisect_left(positions, self._cursor)
        if at < len(positions):
            return positions[at] - self._cursor
        return positions[0] + len(self._events) - self._cursor

    def next_use(self, use: Use, unit: int) -> int:
        """Return how many uses away the unit's next such use is; ``NEVER`` if none is known."""
        ahead = self._ahead(use, unit)
        if use is Use.COMPUTE and unit in self._unlikely and ahead < NEVER:
            ahead += len(self._events)  # probably skipped this time
        return ahead

    def upcoming(self, most: int) -> Iterator[tuple[int, Use, int]]:
        """Yield the next uses for which weights may move, as (distance, use, unit).

        Yields at most ``most`` of them, and each position at most once.  Uses of units that never
        move take no time here.
        """
        moves, around = self._moves, len(self._events)
        first = bisect_left(moves, self._cursor)
        for turn in range(first, first + len(moves)):
            if most <= 0:
                return
            position = moves[turn % len(moves)]
            use, unit = self._events[position]
            if use is Use.UPDATE or unit not in self._unlikely:
                most -= 1
                yield (position - self._cursor) % around, use, unit
