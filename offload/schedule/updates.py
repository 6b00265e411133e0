"""The queue of units to update: stages weights, gradients and state, runs, writes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import islice

from ..facts.tier import Tier
from .arena import Arena, Place
from .commits import Commits
from .gradients import Gradients
from .layout import Layout
from .messages import Clear, Instruction, Item, Kind, Read, Update, Write
from .order import NEVER, Order, Use
from .units import Subgroup
from .visits import visitors
from .weights import Roles, Weights

UNITS_AHEAD = 3  # units whose weights and gradients are staged while the first one is updated


class _State:
    """The record of one subgroup: its place while in memory (the start of ``slot``), its extents.

    ``claimed`` from when an update stages it until it is written; otherwise a copy in a slot is
    clean, and there only because it comes next.
    """

    __slots__ = ("claimed", "place", "ready", "roles", "slot")

    def __init__(self, place: Place | None, pair: bool) -> None:
        self.place = place
        self.slot: Place | None = None
        self.ready = place is not None
        self.claimed = False
        self.roles = Roles(pair)


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


class Updates:
    """First come, first served: the head of the queue always gets its room first."""

    def __init__(
        self,
        layout: Layout,
        order: Order,
        weights: Weights,
        gradients: Gradients,
        emit: Callable[[Instruction], None],
    ) -> None:
        self.layout, self.order, self._emit = layout, order, emit
        self.weights, self.gradients = weights, gradients
        self.commits: Commits  # set by the machine
        regions = layout.regions
        base = regions.host_fixed + regions.host_weights + regions.host_grads
        self.arena = Arena(Tier.HOST, base, regions.state_slot * regions.state_slots)
        self.slot_bytes = regions.state_slot
        visits = regions.device_visits
        self.visits = Arena(Tier.DEVICE, regions.device_bytes - visits, visits)
        self._visitors = visitors(layout)
        self.sizes = [s.nbytes for group in layout.subgroups for s in group]
        self.cached: set[int] = set()  # records in slots
        self.states: list[_State] = []
        self.unit_of: list[int] = []
        for unit, home in enumerate(layout.homes):
            for place in home.state_places:
                self.states.append(_State(place, layout.durable))
                self.unit_of.append(unit)
        self.queue: deque[_Task] = deque()
        self.updated: set[int] = set()  # units updated since the last end of a step
        self.writing = 0
        self._forwards = False
        self._queued: list[int] = []  # the units of this step in the order of their updates
        self._coming: deque[int] = deque()  # subgroups on disk in the order expected next
        self._turns: dict[int, int] = {}  # of those that are coming

    @property
    def busy(self) -> bool:
        """Whether an update runs or one of its writes has not landed."""
        return bool(self.queue) or self.writing > 0

    def blocked_at(self) -> int | None:
        """The unit whose update is next, if there is one."""
        return self.queue[0].unit if self.queue else None

    def add(self, unit: int) -> None:
        """Queues a unit, unless this step updated it already."""
        if unit not in self.updated:
            self.updated.add(unit)
            self._queued.append(unit)
            while self._coming and self.unit_of[self._coming[0]] in self.updated:
                del self._turns[self._coming.popleft()]
            self.weights.begin_update(unit)
            self.order.observe(Use.UPDATE, unit)
            self.queue.append(_Task(unit, self.layout.subgroups[unit]))

    def in_order(self, units: Sequence[int]) -> list[int]:
        """The best order for a step's updates: as compute will want them, or, where compute waits
        for all of them, turned round every time, so that each begins with what is still there."""
        if not self.weights.drains:
            return sorted(units, key=lambda unit: (self.order.next_use(Use.COMPUTE, unit), unit))
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
        self._coming = deque(
            subgroup.index
            for unit in order
            for subgroup in self.layout.subgroups[unit]
            if self._on_disk(subgroup.index)
        )
        self._turns = {index: turn for turn, index in enumerate(self._coming)}
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
            if not self._stage_state(task.subgroups[task.staged]):
                return False
            task.staged += 1
        there = task.holds_weights or home.weights is Tier.DEVICE
        task.complete = there and self.gradients.held(unit)
        return True

    def _fetch_gradients(self, unit: int, number: int) -> bool:
        """Takes room only after all before it: theirs may still have to arrive through it."""
        before = islice(self.queue, number)
        return all(self.gradients.fetched(t.unit) for t in before) and self.gradients.fetch(unit)

    def _stage_state(self, subgroup: Subgroup) -> bool:
        state = self.states[subgroup.index]
        if state.place is None and not self._fetch(subgroup.index, ()):
            return False
        state.claimed = state.slot is not None
        return True

    def _fetch(self, index: int, keep: Container[int]) -> bool:
        """Starts to bring a record into a slot, but into none that one of ``keep`` has."""
        state = self.states[index]
        state.slot = self.arena.allocate(self.slot_bytes)
        if state.slot is None:
            victim = self._victim(keep)
            if victim is None:
                return False
            self._drop(victim)
            state.slot = self.arena.allocate(self.slot_bytes)
            assert state.slot is not None
        state.place = state.slot._replace(nbytes=self.sizes[index])
        self.cached.add(index)
        item = Item(Kind.STATE, index)
        if state.roles.written:
            self._emit(Read(item, state.roles.newest, state.place))
        else:
            self._emit(Clear(item, state.place))
        return True

    def _victim(self, keep: Container[int]) -> int | None:
        """A clean record that may give way: the one that comes last."""
        clean = [
            i
            for i in self.cached
            if self.states[i].ready and not self.states[i].claimed and i not in keep
        ]
        return max(clean, key=lambda i: self._turns.get(i, NEVER), default=None)

    def _drop(self, index: int) -> None:
        state = self.states[index]
        assert state.slot is not None and not state.claimed
        self.arena.free(state.slot)
        state.slot, state.place, state.ready = None, None, False
        self.cached.discard(index)

    def prefetch(self) -> None:
        """Reads the records that come next into slots that no update has claimed."""
        count = self.layout.regions.state_slots
        if self.queue or not self._coming:
            return
        first = list(islice(self._coming, count))
        for index in first:
            if self.states[index].place is None and not self._fetch(index, first):
                return

    def drop_cached(self) -> None:
        """Forgets all records that are only cached.  Nothing may be under way."""
        for index in list(self.cached):
            self._drop(index)

    def _dispatch(self, task: _Task) -> bool:
        """Whether all of the task's subgroups have been dispatched."""
        unit, home = task.unit, self.layout.homes[task.unit]
        if not self.gradients.held(unit) or not self.weights.may_update(unit):
            return False
        if home.weights is not Tier.DEVICE and not task.holds_weights:
            return False
        copy = self.weights.units[unit].device if home.weights is Tier.DEVICE else None
        copy = copy or self.weights.units[unit].host
        grads = self.gradients.units[unit].slot
        assert copy is not None and grads is not None
        weights = Item(Kind.WEIGHTS, unit)
        if self.commits.blocks(weights):
            return False
        while task.next < task.staged:
            subgroup = task.subgroups[task.next]
            state = self.states[subgroup.index]
            item = Item(Kind.STATE, subgroup.index)
            if self.commits.blocks(item) or not state.ready or state.place is None:
                return False
            visit = None
            if subgroup.index in self._visitors:
                visit = self.visits.allocate(self.layout.regions.visit_slot)
                if visit is None:
                    return False
            self.commits.change(item)
            self.commits.change(weights)
            self._emit(Update(subgroup.index, unit, copy.place, grads, state.place, visit))
            task.next += 1
        return task.next == len(task.subgroups)

    # -- events ---------------------------------------------------------------------------------

    def state_ready(self, index: int) -> None:
        self.states[index].ready = True

    def update_done(self, signal: Update) -> None:
        task = next(task for task in self.queue if task.unit == signal.unit)
        if signal.visit is not None:
            self.visits.free(signal.visit)
        state = self.states[signal.subgroup]
        if self._on_disk(signal.subgroup):
            self.writing += 1
            assert state.place is not None
            item = Item(Kind.STATE, signal.subgroup)
            self._emit(Write(item, state.roles.target(), state.place))
        task.done += 1
        if task.done == len(task.subgroups):
            self.queue.remove(task)
            self.gradients.consumed(task.unit)
            self.writing += self.layout.homes[task.unit].weights is Tier.NVME
            self.weights.updated(task.unit)

    def _on_disk(self, index: int) -> bool:
        unit = self.unit_of[index]
        first = self.layout.subgroups[unit][0].index
        return self.layout.homes[unit].state[index - first] is Tier.NVME

    def state_written(self, index: int) -> None:
        state = self.states[index]
        state.roles.wrote()
        state.claimed = False
        self.writing -= 1

    def weights_written(self) -> None:
        self.writing -= 1
