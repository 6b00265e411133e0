"""The units whose forward is running, and the cleanup after an exception."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..activations.recompute import Around
from ..activations.saved_tensor_hooks import SavedTensors
from ..activations.untracked_activations import UntrackedForward
from ..errors import BudgetError
from ..params.backward import Backward
from ..params.onloaded_units import OnloadedUnits
from ..private import module_private, torch_private
from ..private.trainer import Trainer

log = logging.getLogger("overspill")
T = TypeVar("T")
Inputs = tuple[Iterable[Any], Mapping[str, Any]]  # of a forward


class _Frame:
    """One unit whose forward runs in this thread."""

    __slots__ = ("around", "autocast_cache", "away", "began", "hooked", "task", "unit")

    def __init__(
        self, unit: int, autocast_cache: bool, around: Around | None, *, away: bool, hooked: bool
    ) -> None:
        self.unit, self.autocast_cache, self.around = unit, autocast_cache, around
        self.away = away  # the end of this frame does not close the unit
        self.hooked = hooked  # with saved-tensor hooks
        self.began = torch_private.graph_clock()
        self.task = torch_private.current_graph_task()


class _Stack(threading.local):
    """The frames of the current thread, outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.roots = 0  # enclosing forwards of a whole model, with saved-tensor hooks
        self.untracked: UntrackedForward | None = None  # the forward of a whole model that runs
        self.inside: list[int] = []  # ids of the entries that run, if there are several


class ForwardStack:
    """The stack of running forwards, with the engine's saved-tensor hooks around each one.

    An enclosing pair of hooks gets every saved tensor that is not a weight.
    """

    def __init__(
        self,
        onloaded_units: OnloadedUnits,
        saved: SavedTensors,
        backward: Backward,
        trainer: Trainer,
        entries: Iterable[nn.Module],
    ) -> None:
        """
        Args:
            entries: the modules whose forward is one of a whole model.
        """
        # Only weak references: autograd graphs that a user keeps refer to this object.
        self._entries = weakref.WeakSet(entries)
        self._onloaded_units, self._saved, self._backward = onloaded_units, saved, backward
        self._trainer, self._mine = trainer, _Stack()
        self._told_nested = False

    def begins_inside(self, entry: nn.Module) -> bool:
        """Return whether an entry is called in the forward of another one, as a part of it."""
        if len(self._entries) == 1:
            return False
        running = self._mine.inside
        if not torch_private.in_backward():
            around = torch_private.modules_around(entry)
            if around is not None and not any(module in self._entries for module in around):
                running.clear()  # an interrupt may have left some
        running.append(id(entry))
        return len(running) > 1

    def ends_inside(self, entry: nn.Module) -> bool:
        """Return whether an entry that has ended was called in the forward of another one."""
        if len(self._entries) == 1:
            return False
        running = self._mine.inside
        if running and running[-1] == id(entry):
            running.pop()
        return bool(running)

    @property
    def entries_inside(self) -> int:
        """The number of entries that run in this thread, if there are several."""
        return len(self._mine.inside)

    @property
    def in_use(self) -> bool:
        """Whether this thread runs a forward of a whole model, or a backward."""
        running = torch_private.running_modules()
        return torch_private.in_backward() or any(m in self._entries for m in running)

    def push_root(self, inputs: Inputs | None = None) -> None:
        """Begin a forward of a whole model; activations between units can be offloaded too.

        See Note [Forwards without saved-tensor hooks] in ``untracked_activations.py``.
        """
        offloader, mine = self._saved.saved_offloader, self._mine
        if offloader is None or not torch_private.saved_tensor_hooks_allowed():
            return
        top = torch_private.top_saved_tensor_hooks()
        if inputs is not None and top is None and not torch_private.in_backward():
            mine.untracked = offloader.begin_forward(*inputs)
            if mine.untracked is not None and mine.untracked.known is not None:
                return
        outer = self._saved.around(top)
        torch_private.push_saved_tensor_hooks(self._saved.packing(outer), self._saved.unpack)
        mine.roots += 1

    def pop_root(self, *, completed: bool) -> None:
        """End a forward of a whole model that has returned (``completed``) or raised."""
        mine = self._mine
        if mine.roots and not mine.frames:
            mine.roots -= 1
            torch_private.pop_saved_tensor_hooks()
        untracked, mine.untracked = mine.untracked, None
        if untracked is not None and completed:
            assert self._saved.saved_offloader is not None
            self._saved.saved_offloader.end_forward(untracked)

    def enter(self, unit: int) -> None:
        """Onload a unit whose forward begins.

        It may run inside another unit without being part of it in the module tree, for instance if
        an adapter replaces ``forward``. The plan has no room for both, so the outer units are then
        offloaded, and read op by op until they end.
        """
        try:
            self._onloaded_units.enter(unit)
        except BudgetError as error:
            outer = [frame.unit for frame in self._mine.frames if not frame.away]
            if not self.put_away():
                raise
            self._tell_nested(unit, outer, error)
            self._onloaded_units.enter(unit)

    def _tell_nested(self, unit: int, outer: Sequence[int], error: BudgetError) -> None:
        if self._told_nested:
            return
        self._told_nested = True
        units = self._onloaded_units.parts.units
        log.warning(
            "overspill: unit %r runs inside %s, which its place in the model does not show, and "
            "there is no room for both; they are onloaded in turns, which is slow. To avoid that, "
            "keep it on the device: resident=[%r] (or a larger budget: %s)",
            units[unit].name, ", ".join(repr(units[each].name) for each in outer),
            units[unit].name, error,
        )  # fmt: skip

    def push(
        self, unit: int, around: Around | None = None, *, away: bool = False, read: bool = False
    ) -> None:
        """Push a frame for a unit that is open and runs until ``pop``.

        Args:
            around: ends with the unit's forward.
            away: another caller opens and closes the unit.
            read: the unit's weights are read outside its forward.
        """
        top, uncounted = torch_private.top_saved_tensor_hooks(), self._runs_uncounted()
        hooked = (
            top is not None or read or around is not None or self._saved.by_handles(unit)
            or not uncounted
        )  # fmt: skip
        cached = torch.is_autocast_cache_enabled()
        frame = _Frame(unit, cached, around, away=away, hooked=hooked)
        if hooked:
            packing = self._saved.packing(self._saved.around(top))
            torch_private.push_saved_tensor_hooks(packing, self._saved.unpack)
        if self._saved.moves(unit):  # the cache would keep casts of offloaded weights
            torch.set_autocast_cache_enabled(False)
        self._mine.frames.append(frame)

    def _runs_uncounted(self) -> bool:
        """Count the run of a unit; return whether nothing that it saves has to be counted."""
        offloader, untracked = self._saved.saved_offloader, self._mine.untracked
        if offloader is None or untracked is None or torch_private.in_backward():
            return False
        untracked.units += 1
        return offloader.resting.without_hooks(untracked)

    def may_run(self) -> bool:
        """Return whether ``run`` can be used.

        It cannot if other code handles saved tensors in ways that the engine does not know.
        Checkpoints are known: they drop them.
        """
        top = torch_private.top_saved_tensor_hooks()
        known = top is None or self._saved.is_packing(top) or torch_private.of_checkpoint(top)
        return known and torch_private.saved_tensor_hooks_allowed()

    def run(self, unit: int, function: Callable[[], T]) -> T:
        """Return what ``function`` computes with weights of an open unit, outside its forward."""
        top = torch_private.top_saved_tensor_hooks()
        if top is None or self._saved.is_packing(top):
            self.push(unit, away=True, read=True)  # the reader has opened the unit, and closes it
            try:
                return function()
            finally:
                self._pop()
        # A checkpoint counts saved tensors, in forward and in the recomputation, where the unit may
        # be open for backward and this function is not called. So no hooks are pushed.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return function()
        finally:
            torch.set_autocast_cache_enabled(cached)

    def pop(self, unit: int, *, completed: bool) -> int | None:
        """Pop the unit's frame and release the unit; ``completed`` is false if its forward raised.

        Returns:
            The graph's clock when the unit began, or ``None`` if it is not the innermost frame.
        """
        stack = self._mine.frames
        if not stack or stack[-1].unit != unit:
            return None
        frame = self._pop(completed=completed)
        self._leave(frame)
        return frame.began

    def _leave(self, frame: _Frame) -> None:
        if not frame.away:
            self._onloaded_units.leave(frame.unit)

    def returned(self, output: Any) -> None:
        """Count what a unit has returned."""
        if (untracked := self._mine.untracked) is not None:
            leaves = [output] if type(output) is torch.Tensor else torch_private.tree_leaves(output)
            for t in leaves:
                # Of other classes, deferred logits would be computed, and lengths may be symbols.
                if type(t) is torch.Tensor and not t.is_nested:
                    untracked.elements += t.numel()

    def put_away(self) -> bool:
        """Release the units that run in this thread, to make room for one that is read inside them.

        Until they end, their weights are read op by op. Returns false if there are none, or if
        scripted code runs in one, which reads parameters without calling the engine.
        """
        here = [frame for frame in self._mine.frames if not frame.away]
        found = self._onloaded_units.parts.found
        if any(module_private.is_scripted(found[frame.unit].module) for frame in here):
            return False
        for frame in here:
            frame.away = True
            self._onloaded_units.leave(frame.unit)
        return bool(here)

    def _pop(self, *, completed: bool = False) -> _Frame:
        frame = self._mine.frames.pop()
        # A backward that raised has removed its hooks already.
        if frame.hooked and frame.task == torch_private.current_graph_task():
            torch_private.pop_saved_tensor_hooks()
        if frame.around is not None:
            frame.around.end(completed=completed)
        torch.set_autocast_cache_enabled(frame.autocast_cache)
        return frame

    def backward_reads(self, unit: int) -> None:
        """Open a unit that backward reads outside of its module, until backward enters another."""
        self._backward.enter(unit)

    # -- after an exception ---------------------------------------------------------------------

    def tidy(self, *, reading: bool = False) -> None:
        """Close what an exception left open, unless this thread runs a forward or a backward.

        Reading weights between forwards needs the room. ``reading``: keep open what is kept for
        readers.
        """
        kept = not reading and self._onloaded_units.kept is not None
        if not (self._mine.frames or kept or self._onloaded_units.in_use):
            return
        self._trainer.require()
        if kept:
            self._onloaded_units.let_go()
        if not torch_private.in_backward() and not torch_private.in_module():
            self._clear()

    def make_room(self, module: nn.Module) -> None:
        """Close what an exception left open, before ``module`` runs, maybe outside of the model."""
        if (self._mine.frames or self._onloaded_units.in_use) and self._left_behind(module):
            self._onloaded_units.executor.health.check()  # another thread may be closing all that
            self._clear()

    def _left_behind(self, module: nn.Module) -> bool:
        """Return whether open units were left open by an exception when ``module`` is called.

        They were if none of the modules that run around it has opened them.
        """
        if torch_private.in_backward() or not self._trainer.alone():
            return False  # another thread of the same forward may have opened units
        around = torch_private.modules_around(module)
        found = self._onloaded_units.parts.found
        mine = [found[frame.unit].module for frame in self._mine.frames]
        return around is not None and not any(m is other for m in mine for other in around)

    def begin(self) -> None:
        """Begin a forward of a whole model, and close what an interrupted one left open."""
        if torch_private.in_backward():
            self._leave_all()
        else:
            self._clear()
            self._trainer.begins()

    def forget(self) -> None:
        """Remove hooks that an exception may have left on this thread, because the engine ends."""
        while self._mine.frames:
            self._pop()
        self._forget_roots()

    def _clear(self) -> None:
        self._leave_all()
        self._backward.abandon()
        self._onloaded_units.reset()

    def _leave_all(self) -> None:
        while self._mine.frames:
            self._leave(self._pop())
        self._forget_roots()

    def _forget_roots(self) -> None:
        while self._saved.is_packing(torch_private.top_saved_tensor_hooks()):
            torch_private.pop_saved_tensor_hooks()
        self._mine.roots, self._mine.untracked = 0, None
