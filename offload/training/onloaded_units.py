"""Makes parameters point into their slot while the unit is in use, and at a stub otherwise.

A stub keeps shape, dtype and device, holds one NaN of its own and no more, so that a stray read
shows.  Every residency gets a new storage object over the slot: when that has expired, nothing
points into the slot any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, OffloadError
from ..movement.accelerators.base import Accelerator
from ..movement.executor import Executor
from ..planning.partition import Partition
from ..schedule.arena import Place
from ..schedule.units import Unit
from . import torch_private
from .edit_watch import Change, EditWatch
from .param_handle import ParamHandle, WeightAccess, managed
from .parameters import manage
from .slot_refs import SlotRefTracker
from .stubs import Stubs
from .views import OnloadedUnit, View, make_views

_KEPT_VIEWS = 4  # for each parameter: as it is, transposed; parts of it may be without number
_TRIES, _LOOK_S = 10, 0.02  # to find room that somebody who holds slots may give back


class OnloadedUnits:
    """Opens and closes units for compute.  Counts uses; the first opens, the last closes."""

    def __init__(
        self, parts: Partition, executor: Executor, accelerator: Accelerator, held: SlotRefTracker,
        stubs: Stubs, changing: set[int],
    ) -> None:  # fmt: skip
        """``changing``: parameters that their modules have changed in forward."""
        self.parts, self.executor, self.accelerator = parts, executor, accelerator
        self._held, self._stubs = held, stubs
        count = len(parts.units)
        layout = executor.layout
        self.fixed = [home.resident for home in layout.homes]
        # By unit, where its weights are for compute; what moves, as long as it is open.
        self.places: list[Place | None] = [
            home.device_place if there else home.host_place
            for home, there in zip(layout.homes, layout.apart, strict=True)
        ]
        self.groups, self.users, self.streamed = layout.together, layout.users, layout.streamed
        self.uses = [0] * count  # of a unit as a whole
        self.open = [0] * count  # of its weights, through itself or a unit that shares them
        self.kept: int | None = None  # open for who reads it from outside, hidden; in nobody's use
        self._ahead: int | None = None  # the same, but its parameters are visible
        self._visible = [False] * count  # whether its parameters show its weights
        self._viewers = [0] * count  # uses that need them to, through itself or a unit that shares
        self.current: list[OnloadedUnit | None] = [None] * count
        self.by_storage: dict[int, OnloadedUnit] = {}
        self._hidden: list[tuple[torch.Tensor, ...]] = [()] * count  # what they show hidden
        self._params: list[tuple[nn.Parameter, ...]] = [
            tuple(parts.parameters[spec.index] for _, spec in unit.params) for unit in parts.units
        ]
        self._managed: list[tuple[ParamHandle, ...]] = [()] * count
        self._place_in_unit = {
            spec.index: place for unit in parts.units for place, (_, spec) in enumerate(unit.params)
        }
        self._edits = EditWatch(parts, self._params, changing)
        # Takes back what was given away, where an exception came before it was.
        self.returning: Callable[[], None] | None = None

    def install(self, access: WeightAccess) -> None:
        """Takes the parameters over; all are hidden."""
        for unit in self.parts.units:
            if self.fixed[unit.index]:
                # Hidden, they have their weights all the same: graphs may have saved them.
                onloaded = self.current[unit.index] = self._residence(unit.index)
                self.by_storage[torch_private.identity(onloaded.storage)] = onloaded
                self._hidden[unit.index] = tuple(onloaded.views)
            else:
                self._hidden[unit.index] = self._stubs.of(unit)
            torch_private.outdate(self._params[unit.index])  # graphs from before have no weights
            self._manage(unit, access)
            self._to_stubs(unit.index)

    def _manage(self, unit: Unit, access: WeightAccess) -> None:
        pairs = zip(self._params[unit.index], unit.params, strict=True)
        self._managed[unit.index] = tuple(manage(p, spec, access) for p, (_, spec) in pairs)

    def give_away(self, values: Sequence[torch.Tensor]) -> None:
        """All parameters are ordinary ones again, with these weights, by their index.  It may be
        done again where an exception came in between."""
        for unit, params in enumerate(self._params):
            for p, known in zip(params, self._managed[unit], strict=False):
                known.release(p, values[known.index])
            self._managed[unit] = ()

    def take_back(self, access: WeightAccess) -> None:
        """Parameters that were given away show what they did before."""
        for unit in self.parts.units:
            self._manage(unit, access)
            if self._visible[unit.index]:
                self._to_views(unit.index)
            else:
                self._to_stubs(unit.index)

    def close(self) -> list[torch_private.StorageWatch]:
        """All parameters show a stub for good.  Returns watches of the storages over memory of the
        engine that may still be in use."""
        watches = self._held.watches
        for unit, onloaded in enumerate(self.current):
            self._hidden[unit] = ()  # of a resident unit its weights, which must be nobody's now
            if self._managed[unit]:  # and not given away
                self._hidden[unit] = self._stubs.of(self.parts.units[unit])
                self._to_stubs(unit)
                torch_private.outdate(self._params[unit])
            if onloaded is not None:
                watches.append(torch_private.StorageWatch(onloaded.storage))
        self.by_storage.clear()
        self.current = [None] * len(self.current)
        return watches

    def _residence(self, unit: int) -> OnloadedUnit:
        storage = torch_private.storage_over(self.executor.arenas.bytes_of(self.place(unit)))
        return OnloadedUnit(unit, storage, make_views(self.parts.units[unit], storage))

    def place(self, unit: int) -> Place:
        """Where compute has the unit's weights; it is open or fixed."""
        place = self.places[unit]
        assert place is not None, f"unit {unit} is not in memory"
        return place

    # Of a unit that is given away, no parameter shows anything.

    def _to_stubs(self, unit: int) -> None:
        params = zip(self._params[unit], self._managed[unit], self._hidden[unit], strict=False)
        for p, known, stub in params:
            known.hide(p, stub)
        self._edits.hidden(unit)

    def _to_views(self, unit: int) -> None:
        self._edits.end_of_hiding(unit)
        onloaded = self.current[unit]
        assert onloaded is not None
        params = zip(self._params[unit], self._managed[unit], onloaded.views, strict=False)
        for p, known, view in params:
            known.show(p, view)
        self._edits.shown(unit)

    def suspend(self, unit: int) -> None:
        """Nobody may see the weights of a unit that is there before ``resume``."""
        self._edits.look_while_shown(unit, partial(self._join, unit))
        self._to_stubs(unit)
        self._visible[unit] = False

    def _join(self, unit: int) -> None:
        if (onloaded := self.current[unit]) is not None:
            self.accelerator.join(onloaded.streams)

    def resume(self, unit: int) -> None:
        """They may be seen again."""
        self._visible[unit] = True  # first: what is visible is found again after an exception
        self._to_views(unit)

    def outdate(self, unit: int, changed: Container[int] | None = None) -> None:
        """Weights of a unit change, by parameter (``None``: all that are trained): graphs that have
        saved these parameters themselves must not be run backward any more."""
        if not self.fixed[unit]:
            return  # no graph has saved more than a handle
        groups = self.parts.groups
        self._edits.outdate(
            unit, lambda i: groups[i] is not None if changed is None else i in changed
        )

    def params_of(self, unit: int) -> tuple[nn.Parameter, ...]:
        """The unit's own parameters."""
        return self._params[unit]

    def weight(self, index: int) -> torch.Tensor:
        """The weights of a parameter where they are now; its unit is open or fixed."""
        onloaded = self.current[self.parts.unit_of[index]]
        assert onloaded is not None
        return onloaded.views[self._place_in_unit[index]]

    def refuse_placeholder(self, t: torch.Tensor) -> None:
        """
        Raises:
            OffloadError: a tensor that autograd saves is the placeholder of a parameter.
        """
        if (index := self._stubs.index_of(t)) is not None:
            raise OffloadError(
                f"parameter {self.parts.names[index]!r} was used while its weights were offloaded, "
                "by an operation that does not ask for them (compiled code of an extension, say), "
                "so its result is NaN; call the module that holds the parameter, pass a copy "
                "(p.data.clone()), or name the module in resident="
            )

    def refuse_edits(self) -> None:
        """See ``EditWatch.refuse``."""
        self._edits.refuse()

    def changed(self) -> dict[int, Change]:
        """See ``EditWatch.changed``; of units that are not in use."""
        unit_of = self.parts.unit_of
        return {i: t for i, t in self._edits.changed.items() if not self.uses[unit_of[i]]}

    def may_change(self, unit: int) -> bool:
        """Whether a unit's module, which is about to run, may change its weights in host memory."""
        if self.accelerator.has_device_memory:
            return False
        return self._edits.may_change(unit, self.groups[unit])

    def will_run(self, unit: int) -> None:
        """See ``EditWatch.will_run``."""
        self._edits.will_run(unit)

    def forget_changed(self, indices: Iterable[int]) -> None:
        """See ``EditWatch.forget``."""
        self._edits.forget(indices)

    def check_shown(self, hidden: Container[int]) -> None:
        """Check parameters that never move: record changes in place, and raise if one was given
        other data.  ``hidden``: units whose parameters are placeholders now."""
        for unit, onloaded in enumerate(self.current):
            self._edits.look_while_hidden(unit)
            if self.fixed[unit] and onloaded is not None and unit not in hidden:
                self._check(unit, onloaded.views)
                self._edits.look_while_shown(unit, partial(self._join, unit))
                self._edits.shown(unit)
        self._edits.refuse()

    # -- opening and closing --------------------------------------------------------------------
    # An exception may come between any two lines.  What is granted, open or shown stays counted
    # until it is undone as a whole, so that ``reset`` finds it; no slot is let go that still shows.

    # Note [Visible parameters]
    # A unit that is onloaded need not be visible: its parameters may still be placeholders of the
    # class ``OffloadedParam``.  They point at their weights, and are of a plain class, only while
    # the unit's own forward runs, for then the engine's hooks turn what autograd saves of them into
    # handles.  Backward needs weights too, but by these handles.  Were they visible then, code
    # that computes a forward again without calling the module (a checkpoint around ``forward``, or
    # a reentrant one) would use them without hooks: autograd would save the parameter itself,
    # which may be a placeholder again when it is needed, and gradients would be NaN.  Code that
    # uses a hidden parameter is served by ``OffloadedParam``, with hooks.

    def enter(self, unit: int, *, visible: bool = True) -> None:
        """Onload a unit for compute; ``visible``: its parameters show their weights.

        Each call is paired with one of ``leave``.  See Note [Visible parameters].
        """
        if not self.streamed[unit]:
            return
        if self.uses[unit] == 0:
            if self.kept == unit:
                self._end_ahead()
                self.kept = None
            else:
                self._open(unit)
        self.uses[unit] += 1
        if visible:
            self._make_visible(unit)
        self.use_here(self.groups[unit])

    @torch_private.without_grad
    def _make_visible(self, unit: int) -> None:
        for member in self._moving(unit):
            self._viewers[member] += 1
            if not self._visible[member]:
                self.resume(member)

    def _end_view(self, unit: int) -> None:
        for member in self._moving(unit):
            self._viewers[member] = max(0, self._viewers[member] - 1)

    def _end_ahead(self) -> None:
        unit, self._ahead = self._ahead, None
        if unit is not None:
            self._end_view(unit)

    def _conceal(self, unit: int) -> None:
        """Offloading aside, parameters that no use needs to see are placeholders again."""
        for member in self._moving(unit):
            if self._visible[member] and not self._viewers[member]:
                self.suspend(member)

    @torch_private.without_grad
    def _open(self, unit: int) -> None:
        self.let_go()  # its room is not counted on
        places, opened = self._need(unit), list[int]()
        try:
            for member, place in zip(self.groups[unit], places, strict=True):
                if not self.fixed[member]:
                    opened.append(member)
                    self.open[member] += 1
                    if self.open[member] == 1:
                        self.places[member] = place
                        self._bring(member)
        except BaseException:
            for member in opened:
                self._hide(member)
            self._release(unit)
            raise

    def _need(self, unit: int) -> tuple[Place, ...]:
        """Has a unit's group brought to compute; where its members are."""
        for left in reversed(range(_TRIES)):
            try:
                return self.executor.protocol.need(unit)
            except BudgetError:
                if not self._held or not left:
                    raise
                time.sleep(_LOOK_S)  # another thread may have looked at weights that showed
        raise AssertionError("the last try returns or raises")

    def _bring(self, unit: int) -> None:
        if self.accelerator.has_device_memory:
            place = self.place(unit)
            self.executor.compute.wait_for(place, "copy_in")
            self.accelerator.used(self.executor.arenas.bytes_of(place))
        onloaded = self._residence(unit)
        onloaded.streams.add(self.accelerator.stream())
        onloaded.waited.update(onloaded.streams)
        self.current[unit] = onloaded
        self.by_storage[torch_private.identity(onloaded.storage)] = onloaded
        self._edits.put_on_top(unit, onloaded.views)

    def used_here(self, onloaded: OnloadedUnit) -> None:
        """Compute of the calling thread uses a unit: maybe on another stream than the one it was
        opened on, which has not waited for its weights."""
        stream = self.accelerator.stream()
        if stream not in onloaded.waited:
            self.executor.compute.wait_for(self.place(onloaded.unit), "copy_in")
            onloaded.waited.add(stream)
            onloaded.streams.add(stream)

    def use_here(self, units: Iterable[int]) -> None:
        """``used_here`` for those that are open or stay; the others are opened first."""
        if self.accelerator.has_device_memory:
            for unit in units:
                if (onloaded := self.current[unit]) is not None:
                    self.used_here(onloaded)

    def renewed(self, unit: int) -> None:
        """The weights of a unit that stays may have been updated: every stream waits anew."""
        if (onloaded := self.current[unit]) is not None:
            onloaded.waited.clear()

    def compute_over(self, unit: int) -> None:
        """A resident unit's compute is over for now: an update of its weights waits for it, with
        all streams that the calling thread's has waited for, as plain torch asks of a loop.

        Compute may not have used it since the last update, as where its gradients were left at
        zero: what brought those weights comes first all the same.
        """
        place = self.executor.layout.homes[unit].device_place
        if place is not None and self.accelerator.has_device_memory:
            self.executor.compute.wait_for(place, "copy_in")
            self.accelerator.used(self.executor.arenas.bytes_of(place))
            self.executor.compute.mark(place)

    def _check(self, unit: int, expected: Sequence[torch.Tensor]) -> None:
        """Whether the unit's parameters show what the engine has given them."""
        specs = self.parts.units[unit].params
        for p, given, (_, spec) in zip(self._params[unit], expected, specs, strict=True):
            if torch_private.storage_key(p) != torch_private.storage_key(given):
                raise OffloadError(
                    f"the data of parameter {spec.name!r} was replaced outside of the engine "
                    "(model.to, half, load_state_dict(assign=True), p.data = ...); edit weights "
                    "inside `with overspill.materialized(model, writeback=True)`"
                )

    def leave(self, unit: int, *, keep: bool = False, visible: bool = True) -> None:
        """End a use of a unit; the last one lets it be offloaded.  ``visible``: as for ``enter``.

        ``keep``: what is read once from outside is read again, in chunks or parameter by parameter,
        so the unit stays open until another one is opened or ``let_go`` is called.
        """
        if not self.streamed[unit]:
            return
        self.uses[unit] -= 1
        if visible:
            self._end_view(unit)
        self._conceal(unit)
        if self.uses[unit]:
            return
        # Keep a changed unit until the change is written: a copy on disk may mix old and new.
        changed = not torch_private.in_backward() and self._edits.any_changed(self.groups[unit])
        if keep or changed:
            self._keep(unit)
        else:
            self._close(unit)

    def open_ahead(self, unit: int) -> None:
        """Onload a unit for code that inspects its parameters and then calls it.

        It stays onloaded, outside of any use, until it is called or another unit needs the room.
        """
        if self.streamed[unit] and self.uses[unit] == 0:
            self.enter(unit)
            self.uses[unit] = 0
            self.kept = self._ahead = unit

    def _close(self, unit: int) -> None:
        for member in self._moving(unit):
            self._hide(member)
        self._release(unit)

    def _moving(self, unit: int) -> list[int]:
        return [member for member in self.groups[unit] if not self.fixed[member]]

    def _keep(self, unit: int) -> None:
        self.let_go()
        self._conceal(unit)
        self.kept = unit

    def let_go(self) -> None:
        """What is kept open for readers is so no more."""
        self._end_ahead()
        unit, self.kept = self.kept, None
        if unit is not None:
            self._close(unit)

    def _release(self, unit: int) -> None:
        """Compute lets go of what it was granted."""
        held = self._held.untold(self.groups[unit])
        self.executor.engine_port.release(unit, held)
        self._held.told(held)

    def _hide(self, unit: int) -> None:
        """One use of a unit's weights is over; the last sends its parameters to their stubs."""
        if self.open[unit] != 1:
            self.open[unit] = max(0, self.open[unit] - 1)
            if self._visible[unit] and not self._viewers[unit]:
                self.suspend(unit)
            return
        onloaded, place = self.current[unit], self.places[unit]
        if self._visible[unit]:
            self.suspend(unit)  # may copy the weights: before the slot is released
        if self.accelerator.has_device_memory and place is not None:
            if onloaded is not None:
                self.accelerator.join(onloaded.streams)
            else:  # interrupted before it was shown: what brings the weights may not be over
                self.executor.compute.follow(place)
            self.executor.compute.mark(place)
        if onloaded is not None:
            watch = torch_private.StorageWatch(onloaded.storage)
            held = self._held.add(unit, self.place(unit), watch)
            self.by_storage.pop(torch_private.identity(onloaded.storage), None)
            self.current[unit] = None
            del onloaded
            self._held.look(held)
        self.open[unit] = self._viewers[unit] = 0

    @property
    def in_use(self) -> bool:
        """Whether compute has, or was granted, a unit; not what is kept for readers."""
        kept = () if self.kept is None else self._moving(self.kept)
        left = any(self.uses) or sum(self.open) > len(kept) or self.returning is not None
        return left or self.executor.engine_port.granted > (self.kept is not None)

    def reset(self) -> None:
        """No forward and no backward runs: closes what an exception has left open."""
        if self.returning is not None:
            self.returning()
        for unit, uses in enumerate(self.uses):
            for _ in range(uses):
                self.leave(unit)
        self.let_go()
        for unit, count in enumerate(self.open):
            if count:
                self.open[unit] = 1
                self._hide(unit)
        for unit in self.executor.engine_port.lost(self.uses):
            self._release(unit)

    def view(self, unit: int, view: View) -> torch.Tensor:
        """A tensor over an open unit's slot.  Where the unit stays, the same one each time: what it
        keeps is never let go."""
        onloaded = self.current[unit]
        assert onloaded is not None
        made = onloaded.lasting.get(view)
        if made is None:
            made = view.over(onloaded.storage)
            if self.fixed[unit] and len(onloaded.lasting) < _KEPT_VIEWS * len(onloaded.views):
                onloaded.lasting[view] = made
        return made

    def whereabouts(self, p: Any) -> tuple[int, View] | None:
        """The unit of a parameter, and where it lies in its slot; ``None`` if it is another
        engine's."""
        known, mine = managed(p), self.parts.parameters
        if known is None or known.index >= len(mine) or mine[known.index] is not p:
            return None
        unit = self.parts.unit_of[known.index]
        chunk, spec = list(self.parts.units[unit].params)[self._place_in_unit[known.index]]
        dtype, offset, shape, stride = spec.as_parameter(chunk.dtype)
        return unit, View(chunk.byte_offset // dtype.itemsize + offset, dtype, shape, stride)
