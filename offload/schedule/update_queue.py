"""The queue of units to update: stages weights, gradients and state, and dispatches updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import islice

from ..facts.tier import Tier
from .arena import Place
from .gradient_policy import Gradients
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
    """One unit in the queue.

    Attributes:
        staged, next, done: numbers of subgroups whose records are claimed, whose update was
            dispatched, and whose update has ended.
        begun: whether the task may hold room, so that no other task may overtake it.
        holds_weights: whether it holds the host copy of the weights.
        complete: whether weights, gradients and records are all staged.
    """

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
    """Slots on the device for state records, each for the duration of one update there."""

    def __init__(self, layout: Layout, items: Items) -> None:
        self._items, self._visitors = items, visitors(layout)
        self._slot_bytes = layout.regions.visit_slot
        items.govern(Kind.VISIT, self)

    def goes(self, record: int) -> bool:
        """Return whether the record is copied to the device for its update."""
        return record in self._visitors

    def begin(self, record: int) -> Place | None:
        """Allocate a slot for a record; return ``None`` if all are in use."""
        visit = Item(Key(Kind.VISIT, record), self._slot_bytes)
        copy = self._items.make_room(visit, Tier.DEVICE)
        if copy is None:
            return None
        self._items.add(visit)
        return copy.place

    def end(self, record: int) -> None:
        """Free the slot of a record that was copied back."""
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
    """The queue of updates, first in, first out: the first task gets its room first."""

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
        self.updated: set[int] = set()  # units queued since the last end of a step
        self._writing = 0
        self._forwards = False
        self._queued: list[int] = []  # the units of this step in the order of their updates

    @property
    def busy(self) -> bool:
        """Whether an update is queued or running, or one of its writes has not ended."""
        return bool(self.queue) or self._writing > 0

    def blocked_at(self) -> int | None:
        """Return the unit at the head of the queue, if there is one."""
        return self.queue[0].unit if self.queue else None

    def add(self, unit: int) -> None:
        """Queue a unit, unless this step has queued it already."""
        if unit not in self.updated:
            self.updated.add(unit)
            self._queued.append(unit)
            self.records.passed(self.updated)
            self.weights.begin_update(unit)
            self.gradients.tell_home(unit)
            self.order.observe(Use.UPDATE, unit)
            self.queue.append(_Task(unit, self.layout.subgroups[unit]))

    def in_order(self, units: Sequence[int]) -> list[int]:
        """Return a step's units in the best order for their updates.

        In the background, the order in which compute will use them.  If compute waits for all of
        them, the order is reversed every step, so that each begins with what is still in memory.
        """
        if not self.weights.drains:
            return sorted(units, key=lambda unit: (self.weights.next_compute(unit), unit))
        self._forwards = not self._forwards
        return sorted(units, reverse=not self._forwards)

    def promote(self, unit: int) -> None:
        """Move the update of a unit that compute waits for before all tasks that have not begun.

        Does nothing while its gradients are arriving: tasks before it may hold the room they need.
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
        """Begin a new step: all updates are over, and their order predicts the next one."""
        order = reversed(self._queued) if self.weights.drains else self._queued
        self.records.expect(s.index for unit in order for s in self.layout.subgroups[unit])
        self._queued = []
        self.updated.clear()

    # -- staging --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Stage tasks as far ahead as room allows, and dispatch ready records in order."""
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
                return False  # it holds nothing, so ``promote`` may move another task before it
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
        """Read gradients from disk, but only after those of all earlier tasks: they may need the
        same room.  Return whether the read was started."""
        before = islice(self.queue, number)
        return all(self.gradients.fetched(t.unit) for t in before) and self.gradients.fetch(unit)

    def prefetch(self) -> None:
        """Read ahead the records that are updated next, while no update is queued."""
        if not self.queue:
            self.records.prefetch()

    def _dispatch(self, task: _Task) -> bool:
        """Dispatch the updates that are ready; return whether all of the task's are dispatched."""
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
        """Handle the end of an update of one subgroup; finish the task after its last one."""
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
        """Record that a write of updated weights or state has ended."""
        self._writing -= 1
