"""Who waits for weights: compute that goes on with a unit, and whoever wants its update over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from ..facts.tier import Tier
from .items import Items
from .layout import Layout
from .messages import AwaitUpdate, Grant, Instruction, Key, Kind, Need, Work
from .order import Order, Use
from .updates import DueUpdates
from .weights import Weights


class Demands:
    """Units come to compute in the order in which it asked; what finds no room is refused."""

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
            in_flight: all that moves or is updated.
        """
        self._layout, self._order, self._items = layout, order, items
        self._weights, self._updates = weights, updates
        self._in_flight, self._emit = in_flight, emit
        self._needs: deque[Need] = deque()
        self._catching_up: list[AwaitUpdate] = []
        self._resort = (-1, 0)  # the ticket that came to the last resort, and how often

    @property
    def compute_waits(self) -> bool:
        """Whether compute waits for a unit."""
        return bool(self._needs)

    def tickets(self) -> list[int]:
        """Of all who wait."""
        return [need.ticket for need in self._needs] + [each.ticket for each in self._catching_up]

    def need(self, signal: Need) -> None:
        """Compute wants a unit."""
        if not self._order.advance_to(signal.unit):
            self._items.left_order()
        self._needs.append(signal)

    def catch_up(self, signal: AwaitUpdate) -> None:
        """Somebody wants a unit's update over."""
        # What never moves is used in an order too: that in which updates are wanted.  A unit that
        # others come with is seen when they are needed.
        if not self._layout.streamed[signal.unit]:
            self._order.observe(Use.COMPUTE, signal.unit)
        self._catching_up.append(signal)

    def serve(self) -> None:
        """Goes as far as it can with what is wanted; updates that it waits for come first."""
        while self._needs and self._serve(self._needs[0]):
            self._needs.popleft()
        for each in self._catching_up:
            self._updates.promote(each.unit)

    def answer_updated(self) -> None:
        """Grants what only waited for an update."""
        self._catching_up[:] = [each for each in self._catching_up if not self._caught_up(each)]

    def unblock(self) -> None:
        """Where nothing moves and somebody waits, more must give way than otherwise."""
        if self._needs and not self._in_flight:
            self._last_resort(self._needs[0])
        if self._catching_up and not self._in_flight:  # its update may want room that caches have
            self._weights.drop_unused((Tier.DEVICE, Tier.HOST))
            self._updates.advance()

    def forget(self) -> None:
        """Whoever waits was told otherwise."""
        self._needs.clear()
        self._catching_up.clear()

    def _serve(self, need: Need) -> bool:
        """Brings a demanded unit and those it shares to compute; grants when all are usable."""
        group = self._layout.together[need.unit]
        for unit in group:
            self._updates.promote(unit)
        # Waiting for a queued update costs less than to read its weights a second time.
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
        """Grants, unless the unit is to be updated yet."""
        if not self._weights.usable(signal.unit):
            return False
        self._emit(Grant(signal.ticket))
        return True

    def _last_resort(self, need: Need) -> None:
        """Nothing moves, and the demand is not met: its own members may stand in each other's
        way, or small copies where large ones must lie side by side, so start over from nothing; if
        that does not help either, refuse.  It can help more than once, host and device by member,
        but not for ever: what waits for an update that has no room comes here again and again."""
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
