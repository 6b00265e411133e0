"""The queue of units to update: stages weights, gradients and state, runs, writes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..config import Tier
from .arena import Arena, Place
from .gradients import Gradients
from .layout import Layout
from .messages import Clear, Instruction, Item, Kind, Read, Update, Write
from .order import Order, Use
from .subgroups import Subgroup
from .weights import Roles, Weights

UNITS_AHEAD = 3  # units whose weights and gradients are staged while the first one is updated


class _State:
    """The record of one subgroup: its place while staged (the start of ``slot``), its extents."""

    __slots__ = ("place", "ready", "roles", "slot")

    def __init__(self, place: Place | None, pair: bool) -> None:
        self.place = place
        self.slot: Place | None = None
        self.ready = place is not None
        self.roles = Roles(pair)


class _Task:
    """One unit in the queue."""

    __slots__ = ("done", "holds_weights", "next", "staged", "subgroups", "unit")

    def __init__(self, unit: int, subgroups: tuple[Subgroup, ...]) -> None:
        self.unit, self.subgroups = unit, subgroups
        self.staged = self.next = self.done = 0
        self.holds_weights = False


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
        regions = layout.regions
        base = regions.host_fixed + regions.host_weights + regions.host_grads
        self.arena = Arena(Tier.HOST, base, regions.state_slot * regions.state_slots)
        self.slot_bytes = regions.state_slot
        self.states: list[_State] = []
        self.unit_of: list[int] = []
        for unit, home in enumerate(layout.homes):
            for place in home.state_places:
                self.states.append(_State(place, layout.durable))
                self.unit_of.append(unit)
        self.queue: deque[_Task] = deque()
        self.updated: set[int] = set()  # units updated since the last end of a step
        self.writing = 0

    @property
    def busy(self) -> bool:
        """Whether an update runs or one of its writes has not landed."""
        return bool(self.queue) or self.writing > 0

    def add(self, unit: int) -> None:
        """Queues a unit, unless this step updated it already."""
        if unit not in self.updated:
            self.updated.add(unit)
            self.weights.begin_update(unit)
            self.order.observe(Use.UPDATE, unit)
            self.queue.append(_Task(unit, self.layout.subgroups[unit]))

    def end_step(self) -> None:
        self.updated.clear()
        for state in self.states:
            state.roles.commit()

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
        unit, home = task.unit, self.layout.homes[task.unit]
        if not task.holds_weights and home.weights is not Tier.DEVICE:
            if not self.weights.toward_host(unit, number - 1):
                return False
            if self.weights.host_valid(unit):
                self.weights.hold_host(unit)
                task.holds_weights = True
        if not self.gradients.fetch(unit):
            return False
        while task.staged < len(task.subgroups):
            if not self._stage_state(task.subgroups[task.staged]):
                return False
            task.staged += 1
        return True

    def _stage_state(self, subgroup: Subgroup) -> bool:
        state = self.states[subgroup.index]
        if state.place is not None:
            return True
        state.slot = self.arena.allocate(self.slot_bytes)
        if state.slot is None:
            return False
        state.place = state.slot._replace(nbytes=subgroup.nbytes)
        item = Item(Kind.STATE, subgroup.index)
        if state.roles.written:
            self._emit(Read(item, state.roles.newest, state.place))
        else:
            self._emit(Clear(item, state.place))
        return True

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
        while task.next < task.staged:
            subgroup = task.subgroups[task.next]
            state = self.states[subgroup.index]
            if not state.ready or state.place is None:
                return False
            self._emit(Update(subgroup.index, unit, copy.place, grads, state.place))
            task.next += 1
        return task.next == len(task.subgroups)

    # -- events ---------------------------------------------------------------------------------

    def state_ready(self, index: int) -> None:
        self.states[index].ready = True

    def update_done(self, signal: Update) -> None:
        task = self.queue[0]
        assert task.unit == signal.unit, "updates end in the order in which they were dispatched"
        state = self.states[signal.subgroup]
        if self._state_tier(task, signal.subgroup) is Tier.NVME:
            self.writing += 1
            assert state.place is not None
            item = Item(Kind.STATE, signal.subgroup)
            self._emit(Write(item, state.roles.target(), state.place))
        task.done += 1
        if task.done == len(task.subgroups):
            self.queue.popleft()
            self.gradients.consumed(task.unit)
            self.writing += self.layout.homes[task.unit].weights is Tier.NVME
            self.weights.updated(task.unit)

    def _state_tier(self, task: _Task, index: int) -> Tier:
        first = task.subgroups[0].index
        return self.layout.homes[task.unit].state[index - first]

    def state_written(self, index: int) -> None:
        state = self.states[index]
        state.roles.wrote()
        assert state.slot is not None
        self.arena.free(state.slot)
        state.slot, state.place, state.ready = None, None, False
        self.writing -= 1

    def weights_written(self) -> None:
        self.writing -= 1
