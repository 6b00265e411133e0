"""Onloading and offloading of units: parameters point into a slot while compute uses them.

Otherwise a parameter points at its placeholder, which keeps shape, dtype and device and holds a
single NaN, so a stray read is noticed. Each onload creates a new storage object over the slot:
see Note [References to slots] in ``slot_refs.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, WeightError
from ..movement.runtime import Runtime
from ..private import torch_private
from ..schedule.arena import Place
from .edit_watch import Change
from .param_handle import WeightAccess, managed
from .slot_refs import SlotRefTracker
from .stubs import Stubs
from .unit_params import UnitParams
from .views import OnloadedUnit, View, make_views

_KEPT_VIEWS = 4  # whole and transposed ones per parameter; slices could be countless
_TRIES, _LOOK_S = 10, 0.02  # to find room while other threads still hold slots


class OnloadedUnits:
    """Units that are onloaded for compute; the first use opens one, the last closes it."""

    def __init__(self, runtime: Runtime, held: SlotRefTracker, stubs: Stubs) -> None:
        parts = self.parts = runtime.parts
        self.executor, self.accelerator = runtime.executor, runtime.accelerator
        self._held, self._stubs, self._wake = held, stubs, runtime.sleeping.wake
        runtime.sleeping.add_user(self)
        count, layout = len(parts.units), runtime.layout
        self.fixed = [home.resident for home in layout.homes]
        self._fixed_units = [unit for unit, stays in enumerate(self.fixed) if stays]
        # By unit, where compute finds its weights; for units that move, only while they are open.
        self.places: list[Place | None] = [
            home.device_place if there else home.host_place
            for home, there in zip(layout.homes, layout.apart, strict=True)
        ]
        self.groups, self.users, self.streamed = layout.together, layout.users, layout.streamed
        self.moves = [any(m in parts.hooked and not self.fixed[m] for m in g) for g in self.groups]
        self.uses = [0] * count  # uses of the unit as a whole
        self.open = [0] * count  # uses of its weights, by itself or by a unit that shares them
        self.kept: int | None = None  # unit kept open for outside readers; hidden, not in use
        self._ahead: int | None = None  # the same unit if its parameters are visible
        self._visible = [False] * count  # whether its parameters point at its weights
        self._viewers = [0] * count  # uses that need it visible, as for ``open``
        self.current: list[OnloadedUnit | None] = [None] * count
        self.by_storage: dict[int, OnloadedUnit] = {}
        self._unit_params = UnitParams(parts, stubs, runtime.ledger.changing)
        self._place_in_unit = {
            spec.index: place for unit in parts.units for place, (_, spec) in enumerate(unit.params)
        }
        self._edits = self._unit_params.edits
        # By unit, resident weights that other tensors may still be views of
        self._viewed: list[tuple[int, torch_private.StorageWatch]] = []
        # Undoes a ``give_away`` that an exception interrupted.
        self.returning: Callable[[], None] | None = None

    def install(self, access: WeightAccess) -> None:
        """Take over the parameters and hide them all."""
        for unit in range(len(self.fixed)):
            self._put_at_rest(unit)
            torch_private.outdate(self.params_of(unit))  # earlier graphs lose their weights
            self._unit_params.manage(unit, access)
            self._unit_params.hide(unit)

    def _put_at_rest(self, unit: int) -> None:
        """Set what hidden parameters point at: resident ones, which graphs may have saved, keep
        their weights."""
        views: Sequence[torch.Tensor] | None = None
        if self.fixed[unit]:
            onloaded = self.current[unit] = self._onloaded_unit(unit)
            self.by_storage[torch_private.identity(onloaded.storage)] = onloaded
            views = onloaded.views
        self._unit_params.set_hidden_data(unit, views)

    def give_away(self, values: Mapping[int, torch.Tensor], units: Iterable[int]) -> None:
        """Make parameters ordinary, with ``values`` by index; repeatable after an exception."""
        self._unit_params.give_away(values, units)

    def take_back(self, access: WeightAccess, units: Iterable[int]) -> None:
        """Manage parameters again that were given away, visible or hidden as they were before."""
        for unit in units:
            self._unit_params.manage(unit, access)
            if self._visible[unit]:
                self.resume(unit)
            else:
                self._unit_params.hide(unit)

    def close(self) -> list[torch_private.StorageWatch]:
        """Point all parameters at placeholders for good, and return watches of the storages over
        engine memory that may still be in use."""
        for unit in range(len(self.fixed)):
            self._withdraw(unit)
            self._unit_params.invalidate_graphs(unit)
        return [*(watch for _, watch in self._viewed), *self._held.watches]

    def _withdraw(self, unit: int) -> None:
        """Drop all references to a unit's memory, and point its parameters at placeholders."""
        if (onloaded := self.current[unit]) is not None:
            self._viewed.append((unit, torch_private.StorageWatch(onloaded.storage)))
            self.by_storage.pop(torch_private.identity(onloaded.storage), None)
            self.current[unit] = None
        self._unit_params.hide_with_placeholders(unit)

    def detach_memory(self) -> list[str]:
        """Point resident parameters at placeholders, so that their memory can be freed; return the
        names of units, resident or not, to whose memory tensors still refer."""
        for unit in self._fixed_units:
            self._withdraw(unit)
        self._viewed = [(unit, watch) for unit, watch in self._viewed if not watch.expired]
        found = self._held.in_use.union(unit for unit, _ in self._viewed)
        return [self.parts.units[unit].name for unit in sorted(found)]

    def memory_freed(self) -> None:
        """Make graphs that saved resident parameters themselves fail in backward."""
        for unit in self._fixed_units:
            self._unit_params.invalidate_graphs(unit)

    def attach_memory(self) -> None:
        """Point resident parameters at their weights again, which may have moved."""
        for unit in self._fixed_units:
            if self.current[unit] is None:
                self._put_at_rest(unit)
                self._unit_params.hide(unit)

    def _onloaded_unit(self, unit: int) -> OnloadedUnit:
        storage = torch_private.storage_over(self.executor.arenas.bytes_of(self.place(unit)))
        return OnloadedUnit(unit, storage, make_views(self.parts.units[unit], storage))

    def place(self, unit: int) -> Place:
        """Return where compute finds the unit's weights; the unit must be open or resident."""
        place = self.places[unit]
        assert place is not None, f"unit {unit} is not in memory"
        return place

    def suspend(self, unit: int) -> None:
        """Copy changes made to a unit's weights, and hide them until ``resume``."""
        self._edits.look_while_shown(unit, partial(self._join, unit))
        self._unit_params.hide(unit)
        self._visible[unit] = False

    def _join(self, unit: int) -> None:
        if (onloaded := self.current[unit]) is not None:
            self.accelerator.join(onloaded.streams)

    def resume(self, unit: int) -> None:
        """Show the weights of a unit again."""
        self._visible[unit] = True  # first, so that ``reset`` finds it after an exception
        onloaded = self.current[unit]
        assert onloaded is not None
        self._unit_params.show(unit, onloaded.views)

    def outdate(self, unit: int, changed: Container[int] | None = None) -> None:
        """Make graphs that saved these parameters themselves fail in backward: weights change.

        ``changed``: by index; ``None``: all trained ones of the unit.
        """
        if not self.fixed[unit]:
            return  # graphs have saved handles only
        groups = self.parts.groups
        self._edits.outdate(
            unit, lambda i: groups[i] is not None if changed is None else i in changed
        )

    def params_of(self, unit: int) -> tuple[nn.Parameter, ...]:
        """Return the unit's own parameters."""
        return self._unit_params.of[unit]

    def weight(self, index: int) -> torch.Tensor:
        """Return the current weights of a parameter; its unit must be open or resident."""
        onloaded = self.current[self.parts.unit_of[index]]
        assert onloaded is not None
        return onloaded.views[self._place_in_unit[index]]

    def refuse_placeholder(self, t: torch.Tensor) -> None:
        """Raise ``OffloadError`` if autograd is about to save a placeholder or a view of one."""
        if (index := self._stubs.index_of(t)) is not None:
            self.executor.health.check()  # another thread may have closed the engine
            raise WeightError(
                f"parameter {self.parts.shown_names[index]!r} was used while its weights were "
                "offloaded, by an operation that does not ask for them (compiled code of an "
                "extension, say), so its result is NaN; call the module that holds the parameter, "
                "pass a copy (p.data.clone()), or name the module in resident="
            )

    def refuse_edits(self) -> None:
        """Raise for changes that cannot be kept; see ``EditWatch.refuse``."""
        self._edits.refuse()

    def changed(self) -> dict[int, Change]:
        """Return ``EditWatch.changed`` for the units that are not in use."""
        unit_of = self.parts.unit_of
        return {i: t for i, t in self._edits.changed.items() if not self.uses[unit_of[i]]}

    def may_change(self, unit: int) -> bool:
        """Return whether a unit's module, about to run, may change its weights in host memory."""
        if self.accelerator.has_device_memory:
            return False
        return self._edits.may_change(unit, self.groups[unit])

    def changed_before(self, unit: int) -> bool:
        """Return whether a unit's module has changed its weights in any run."""
        return self._edits.changed_before(self.groups[unit])

    def will_run(self, unit: int) -> None:
        """Record that a unit runs now; see ``EditWatch.will_run``."""
        self._edits.will_run(unit)

    def forget_changed(self, indices: Iterable[int]) -> None:
        """Forget changes to these parameters; see ``EditWatch.forget``."""
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
    # An exception may come between any two lines. What is granted, open or shown stays counted
    # until ``reset`` can undo all of it. No slot is released while parameters point at it.

    # Note [Visible parameters]
    # An onloaded unit need not be visible: its parameters may still be placeholders
    # (``OffloadedParam``). They have a plain class and point at their weights only during the
    # unit's own forward, when the engine's hooks turn what autograd saves of them into handles.
    # Backward reads weights through these handles. If parameters were visible then, code that
    # recomputes a forward without calling the module (a checkpoint around ``forward``, or a
    # reentrant one) would use them without hooks. Autograd would save the parameter itself, which
    # may be a placeholder when it is read, and gradients would be NaN. Hidden parameters are read
    # through ``OffloadedParam``, with hooks.

    def enter(self, unit: int, *, visible: bool = True) -> None:
        """Onload a unit for compute; ``visible``: point its parameters at their weights.

        Pair each call with one of ``leave``. See Note [Visible parameters].
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
        """Hide parameters that no use needs to see; the unit stays onloaded."""
        for member in self._moving(unit):
            if self._visible[member] and not self._viewers[member]:
                self.suspend(member)

    @torch_private.without_grad
    def _open(self, unit: int) -> None:
        self.let_go()  # the plan has no room for the kept unit
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
        """Bring a unit's group to compute and return where its members are."""
        self._wake()
        for left in reversed(range(_TRIES)):
            try:
                return self.executor.protocol.need(unit)
            except BudgetError:
                if not self._held or not left:
                    raise
                time.sleep(_LOOK_S)  # another thread may hold a tensor over a slot
        raise AssertionError("the last try returns or raises")

    def _bring(self, unit: int) -> None:
        if self.accelerator.has_device_memory:
            place = self.place(unit)
            self.executor.compute.wait_for(place, "copy_in")
            self.accelerator.used(self.executor.arenas.bytes_of(place))
        onloaded = self._onloaded_unit(unit)
        onloaded.streams.add(self.accelerator.stream())
        onloaded.waited.update(onloaded.streams)
        self.current[unit] = onloaded
        self.by_storage[torch_private.identity(onloaded.storage)] = onloaded
        self._edits.put_on_top(unit, onloaded.views)

    def used_here(self, onloaded: OnloadedUnit) -> None:
        """Make the calling thread's stream wait for a unit's weights, unless it already has."""
        stream = self.accelerator.stream()
        if stream not in onloaded.waited:
            self.executor.compute.wait_for(self.place(onloaded.unit), "copy_in")
            onloaded.waited.add(stream)
            onloaded.streams.add(stream)

    def use_here(self, units: Iterable[int]) -> None:
        """Call ``used_here`` for those of ``units`` that are open or resident."""
        if self.accelerator.has_device_memory:
            for unit in units:
                if (onloaded := self.current[unit]) is not None:
                    self.used_here(onloaded)

    def renewed(self, unit: int) -> None:
        """Make every stream wait again for a resident unit, whose weights may have been updated."""
        if (onloaded := self.current[unit]) is not None:
            onloaded.waited.clear()

    def compute_over(self, unit: int) -> None:
        """Mark the end of compute on a resident unit, for its next update to wait for.

        The mark covers every stream that the calling thread's stream has waited for. That stream
        first waits for the copy of the weights, which compute may not have used since the last
        update.
        """
        place = self.executor.layout.homes[unit].device_place
        if place is not None and self.accelerator.has_device_memory:
            self.executor.compute.wait_for(place, "copy_in")
            self.accelerator.used(self.executor.arenas.bytes_of(place))
            self.executor.compute.mark(place)

    def _check(self, unit: int, expected: Sequence[torch.Tensor]) -> None:
        """Raise if a parameter of the unit does not have the data that the engine gave it."""
        specs = self.parts.units[unit].params
        for p, given, (_, spec) in zip(self.params_of(unit), expected, specs, strict=True):
            if torch_private.storage_key(p) != torch_private.storage_key(given):
                raise WeightError(
                    f"the data of parameter {spec.name!r} was replaced while the engine used it "
                    "(p.data = ..., load_state_dict(assign=True)); assign it between steps, or "
                    "inside `with overspill.materialized(model, writeback=True)`"
                )

    def leave(self, unit: int, *, keep: bool = False, visible: bool = True) -> None:
        """End a use of a unit, with ``visible`` as for ``enter``; the last one offloads it.

        ``keep``: leave it open, for readers that go on by chunk or parameter, until another unit is
        opened or ``let_go`` is called.
        """
        if not self.streamed[unit] or self.executor.health.closed_elsewhere:
            return
        self.uses[unit] -= 1
        if visible:
            self._end_view(unit)
        self._conceal(unit)
        if self.uses[unit]:
            return
        # Keep a changed unit until its change is written: the copy on disk may mix old and new
        # values.
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
        """Close the unit that is kept open for readers, if any."""
        if self.executor.health.closed_elsewhere:
            return
        self._end_ahead()
        unit, self.kept = self.kept, None
        if unit is not None:
            self._close(unit)

    def _release(self, unit: int) -> None:
        """Tell the machine that compute no longer uses what it was granted."""
        self.executor.engine_port.release(unit, held := self._held.untold(self.groups[unit]))
        self._held.told(held)

    def _hide(self, unit: int) -> None:
        """End one use of a unit's weights; the last one hides its parameters."""
        if self.open[unit] != 1:
            self.open[unit] = max(0, self.open[unit] - 1)
            if self._visible[unit] and not self._viewers[unit]:
                self.suspend(unit)
            return
        onloaded, place = self.current[unit], self.places[unit]
        if self._visible[unit]:
            self.suspend(unit)  # before the slot is released: may copy the weights
        if self.accelerator.has_device_memory and place is not None:
            if onloaded is not None:
                self.accelerator.join(onloaded.streams)
            else:  # interrupted before it was shown; the copy in may still run
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
        """Whether compute uses or was granted a unit, except the one kept open for readers."""
        kept = () if self.kept is None else self._moving(self.kept)
        left = any(self.uses) or sum(self.open) > len(kept) or self.returning is not None
        return left or self.executor.engine_port.granted > (self.kept is not None)

    def reset(self) -> None:
        """Close what an exception left open; call it only if no forward or backward runs."""
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
        """Return a tensor over an open unit's slot; a resident unit caches it for good."""
        onloaded = self.current[unit]
        assert onloaded is not None
        made = onloaded.lasting.get(view)
        if made is None:
            made = view.over(onloaded.storage)
            if self.fixed[unit] and len(onloaded.lasting) < _KEPT_VIEWS * len(onloaded.views):
                onloaded.lasting[view] = made
        return made

    def whereabouts(self, p: Any) -> tuple[int, View] | None:
        """Return a parameter's unit and its view of the slot; ``None`` for another engine's."""
        known, mine = managed(p), self.parts.parameters
        if known is None or known.index >= len(mine) or mine[known.index] is not p:
            return None
        unit = self.parts.unit_of[known.index]
        chunk, spec = list(self.parts.units[unit].params)[self._place_in_unit[known.index]]
        dtype, offset, shape, stride = spec.as_parameter(chunk.dtype)
        return unit, View(chunk.byte_offset // dtype.itemsize + offset, dtype, shape, stride)
