"""The queue of units to update: stages weights, gradients and state, runs, writes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import islice

from ..facts.tier import Tier
from .arena import Place
from .gradients import Gradients
from .items import Item, Items, Move
from .layout import Layout
from .messages import Instruction, Key, Kind, Update
from .order import NEVER, Order, Use
from .records import Records
from .snapshots import Snapshots
from .units import Subgroup
from .visits import visitors
from .weights import Weights

UNITS_AHEAD = 3  # units whose weights and gradients are staged while the first one is updated


class _Task:
    """One unit in the queue."""

    __slots__ = (
        "begun",
        "complete",
        "done",
        "holds_weights",
        "next",
        "staged",
        "subgroups",
        "unit",
    )

    def __init__(self, unit: int, subgroups: tuple[Subgroup, ...]) -> None:
        self.unit, self.subgroups = unit, subgroups
        self.staged = self.next = self.done = 0
        self.begun = self.holds_weights = self.complete = False


class _Visits:
    """Room on the device for records that are updated there, for as long as they are."""

    def __init__(self, layout: Layout, items: Items) -> None:
        self._items, self._visitors = items, visitors(layout)
        self._slot_bytes = layout.regions.visit_slot
        items.govern(Kind.VISIT, self)

    def goes(self, record: int) -> bool:
        """Whether the record is updated on the device."""
        return record in self._visitors

    def begin(self, record: int) -> Place | None:
        """The slot for a visit; ``None``: all are taken."""
        visit = Item(Key(Kind.VISIT, record), self._slot_bytes)
        copy = self._items.make_room(visit, Tier.DEVICE)
        if copy is None:
            return None
        self._items.add(visit)
        return copy.place

    def end(self, record: int) -> None:
        """The record is back."""
        self._items.remove(self._items.of(Key(Kind.VISIT, record)))

    def next_use(self, item: Item, tier: Tier) -> int:
        return NEVER

    def may_go(self, item: Item, tier: Tier) -> bool:
        return False

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        return True

    def moved(self, item: Item, work: Move) -> None:
        raise AssertionError("a visit moves within its update")


class DueUpdates:
    """First come, first served: the head of the queue always gets its room first."""

    def __init__(
        self,
        layout: Layout,
        order: Order,
        items: Items,
        weights: Weights,
        gradients: Gradients,
        commits: Snapshots,
        emit: Callable[[Instruction], None],
    ) -> None:
        self.layout, self.order, self._emit = layout, order, emit
        self.weights, self.gradients, self._cuts = weights, gradients, commits
        self.records = Records(layout, items)
        self._device_updates = _Visits(layout, items)
        self.queue: deque[_Task] = deque()
        self.updated: set[int] = set()  # units updated since the last end of a step
        self._writing = 0
        self._forwards = False
        self._queued: list[int] = []  # the units of this step in the order of their updates

    @property
    def busy(self) -> bool:
        """Whether an update runs or one of its writes has not landed."""
        return bool(self.queue) or self._writing > 0

    def blocked_at(self) -> int | None:
        """The unit whose update is next, if there is one."""
        return self.queue[0].unit if self.queue else None

    def add(self, unit: int) -> None:
        """Queues a unit, unless this step updated it already."""
        if unit not in self.updated:
            self.updated.add(unit)
            self._queued.append(unit)
            self.records.passed(self.updated)
            self.weights.begin_update(unit)
            self.gradients.tell_home(unit)
            self.order.observe(Use.UPDATE, unit)
            self.queue.append(_Task(unit, self.layout.subgroups[unit]))

    def in_order(self, units: Sequence[int]) -> list[int]:
        """The best order for a step's updates: as compute will want them, or, where compute waits
        for all of them, turned round every time, so that each begins with what is still there."""
        if not self.weights.drains:
            return sorted(units, key=lambda unit: (self.weights.next_compute(unit), unit))
        self._forwards = not self._forwards
        return sorted(units, reverse=not self._forwards)

    def promote(self, unit: int) -> None:
        """Compute waits for the unit: its update goes before those that have not begun.

        Not while its gradients are on their way: those before it may hold the room they need.
        """
        arrived = self.gradients.held(unit) or self.gradients.stored(unit)
        if unit not in self.weights.updating or not arrived:
            return
        at = next((i for i, task in enumerate(self.queue) if task.unit == unit), 0)
        first = next((i for i, task in enumerate(self.queue) if not task.begun), at)
        if first < at:
            task = self.queue[at]
            del self.queue[at]
            self.queue.insert(first, task)

    def end_step(self) -> None:
        """All has landed: the next step's order is known."""
        order = reversed(self._queued) if self.weights.drains else self._queued
        self.records.expect(s.index for unit in order for s in self.layout.subgroups[unit])
        self._queued = []
        self.updated.clear()

    # -- staging --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Stages as far ahead as room allows and dispatches, in order, what is complete."""
        for number, task in enumerate(self.queue):
            if number >= UNITS_AHEAD or not self._stage(task, number):
                break
        for task in self.queue:
            if not self._dispatch(task):
                break

    def _stage(self, task: _Task, number: int) -> bool:
        if task.complete:
            return True
        unit, home = task.unit, self.layout.homes[task.unit]
        if not task.holds_weights and home.weights is not Tier.DEVICE:
            if not self.weights.toward_host(unit, number - 1):
                return False  # it holds nothing: one that compute waits for may go before it
            task.begun = True
            if self.weights.host_valid(unit):
                self.weights.hold_host(unit)
                task.holds_weights = True
        task.begun = True
        if self.gradients.stored(unit) and not self._fetch_gradients(unit, number):
            return False
        while task.staged < len(task.subgroups):
            if not self.records.claim(task.subgroups[task.staged].index):
                return False
            task.staged += 1
        there = task.holds_weights or home.weights is Tier.DEVICE
        task.complete = there and self.gradients.held(unit)
        return True

    def _fetch_gradients(self, unit: int, number: int) -> bool:
        """Takes room only after all before it: theirs may still have to arrive through it."""
        before = islice(self.queue, number)
        return all(self.gradients.fetched(t.unit) for t in before) and self.gradients.fetch(unit)

    def prefetch(self) -> None:
        """Reads ahead the records that come next, while no update runs."""
        if not self.queue:
            self.records.prefetch()

    def _dispatch(self, task: _Task) -> bool:
        """Whether all of the task's subgroups have been dispatched."""
        unit, home = task.unit, self.layout.homes[task.unit]
        if not self.gradients.held(unit) or not self.weights.may_update(unit):
            return False
        if home.weights is not Tier.DEVICE and not task.holds_weights:
            return False
        copy = self.weights.units[unit].device if home.weights is Tier.DEVICE else None
        copy = copy or self.weights.units[unit].host
        assert copy is not None
        weights, grads = Key(Kind.WEIGHTS, unit), self.gradients.slot(unit)
        if self._cuts.blocks(weights):
            return False
        while task.next < task.staged:
            number = task.subgroups[task.next].index
            record, place = Key(Kind.STATE, number), self.records.ready(number)
            if self._cuts.blocks(record) or place is None:
                return False
            visit = None
            if self._device_updates.goes(number):
                visit = self._device_updates.begin(number)
                if visit is None:
                    return False
            self._cuts.change(record)
            self._cuts.change(weights)
            self._emit(Update(number, unit, copy.place, grads, place, visit))
            task.next += 1
        return task.next == len(task.subgroups)

    # -- events ---------------------------------------------------------------------------------

    def update_done(self, work: Update) -> None:
        """A record and its weights have new values."""
        task = next(task for task in self.queue if task.unit == work.unit)
        if work.visit is not None:
            self._device_updates.end(work.subgroup)
        self._writing += self.records.updated(work.subgroup)
        task.done += 1
        if task.done == len(task.subgroups):
            self.queue.remove(task)
            self.gradients.consumed(task.unit)
            self._writing += self.weights.updated(task.unit)
            self.gradients.tell_home(task.unit)

    def written(self) -> None:
        """A write of an update has ended."""
        self._writing -= 1
