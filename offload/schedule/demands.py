"""Waiting requests for weights: to compute with a unit, or to have its update finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ..facts.tier import Tier
from .items import Items
from .layout import Layout
from .messages import AwaitUpdate, Grant, Instruction, Key, Kind, Need, Work
from .order import Order, Use
from .update_queue import DueUpdates
from .weights import Weights


class Demands:
    """The requests of compute that are not granted yet.

    Units are onloaded in the order in which compute asked.  A unit that finds no room is refused.
    """

    def __init__(
        self,
        layout: Layout,
        order: Order,
        items: Items,
        weights: Weights,
        updates: DueUpdates,
        in_flight: Mapping[Work, int],
        emit: Callable[[Instruction], None],
    ) -> None:
        """
        Args:
            in_flight: the work in progress, with the count of each.
        """
        self._layout, self._order, self._items = layout, order, items
        self._weights, self._updates = weights, updates
        self._in_flight, self._emit = in_flight, emit
        self._needs: deque[Need] = deque()
        self._catching_up: list[AwaitUpdate] = []
        self._resort = (-1, 0)  # the last ticket that needed ``_last_resort``, and how often

    @property
    def compute_waits(self) -> bool:
        """Whether compute waits for a unit."""
        return bool(self._needs)

    def tickets(self) -> list[int]:
        """Return the tickets that are neither granted nor refused yet."""
        return [need.ticket for need in self._needs] + [each.ticket for each in self._catching_up]

    def need(self, signal: Need) -> None:
        """Queue a request of compute for a unit."""
        if not self._order.advance_to(signal.unit):
            self._items.left_order()
        self._needs.append(signal)

    def catch_up(self, signal: AwaitUpdate) -> None:
        """Queue a request to wait until no update of a unit is queued or running."""
        # Resident units never cause a ``Need``, so record their use here: the order of updates
        # depends on it.  A unit with streamed members is recorded when it is needed.
        if not self._layout.streamed[signal.unit]:
            self._order.observe(Use.COMPUTE, signal.unit)
        self._catching_up.append(signal)

    def serve(self) -> None:
        """Move requested units towards compute, and move the updates they wait for forward."""
        while self._needs and self._serve(self._needs[0]):
            self._needs.popleft()
        for each in self._catching_up:
            self._updates.promote(each.unit)

    def answer_updated(self) -> None:
        """Grant the requests whose unit has no pending update any more."""
        self._catching_up[:] = [each for each in self._catching_up if not self._caught_up(each)]

    def unblock(self) -> None:
        """Evict more than usual if requests wait and no move is in progress."""
        if self._needs and not self._in_flight:
            self._last_resort(self._needs[0])
        if self._catching_up and not self._in_flight:  # caches may take the room of its update
            self._weights.drop_unused((Tier.DEVICE, Tier.HOST))
            self._updates.advance()

    def forget(self) -> None:
        """Drop the waiting requests: their callers were notified in another way."""
        self._needs.clear()
        self._catching_up.clear()

    def _serve(self, need: Need) -> bool:
        """Onload a requested unit and the units it shares; grant the ticket when all are usable.

        Return whether the ticket was granted.
        """
        group = self._layout.together[need.unit]
        for unit in group:
            self._updates.promote(unit)
        # Spare units with a queued update: waiting costs less than reading their weights again.
        spare = self._weights.updating.union(group)
        for unit in group:
            self._weights.toward_compute(unit, -1, spare)
        if not all(self._weights.usable(u) for u in group):
            return False
        places = tuple(self._weights.pin(unit) for unit in group)
        self._order.observe(Use.COMPUTE, need.unit)
        self._emit(Grant(need.ticket, places))
        return True

    def _caught_up(self, signal: AwaitUpdate) -> bool:
        """Grant the ticket if no update of the unit is pending; return whether it was granted."""
        if not self._weights.usable(signal.unit):
            return False
        self._emit(Grant(signal.ticket))
        return True

    def _last_resort(self, need: Need) -> None:
        """Drop all unused copies and try again; refuse the request if that does not help.

        Called while nothing moves and the request is not met.  The members of the group may block
        each other, or small copies may split the space that large ones need.  A retry can help once
        per member and tier, so their number is limited.  Without a limit, a unit whose update has
        no room would retry for ever.
        """
        group = self._layout.together[need.unit]
        ticket, times = self._resort
        times = times + 1 if ticket == need.ticket else 1
        self._resort = need.ticket, times
        if times > 2 * len(group) + 2:
            self._needs.popleft()
            waits_for = self._updates.blocked_at()
            unit = need.unit if waits_for is None else waits_for
            self._items.refuse(need.ticket, Key(Kind.WEIGHTS, unit), Tier.HOST)
            return
        self._weights.drop_unused({self._layout.tier_of(unit) for unit in group})
        blocked = [u for u in group if not self._weights.toward_compute(u, -1)]
        if not self._in_flight:
            self._needs.popleft()
            unit = blocked[0] if blocked else need.unit
            tier = self._weights.tier_on_the_way(unit)
            self._items.refuse(need.ticket, Key(Kind.WEIGHTS, unit), tier)
