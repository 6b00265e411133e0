"""The units whose forward runs now, and what an exception has left open of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..errors import BudgetError
from . import module_private, torch_private
from .backward import Backward
from .onloaded_units import OnloadedUnits
from .recompute import Around
from .saved import SavedTensors
from .trainer import Trainer

log = logging.getLogger("overspill")
T = TypeVar("T")


class _Frame:
    """One unit whose forward runs in this thread."""

    __slots__ = ("around", "autocast_cache", "away", "began", "task", "unit")

    def __init__(
        self, unit: int, autocast_cache: bool, around: Around | None, *, away: bool
    ) -> None:
        self.unit, self.autocast_cache, self.around = unit, autocast_cache, around
        self.away = away  # who runs does not close it: others have, or will
        self.began = torch_private.graph_clock()
        self.task = torch_private.current_graph_task()


class _Stack(threading.local):
    """The units that run in the present thread, outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.roots = 0  # forwards of the whole model around them


class ForwardStack:
    """Around each unit's forward the engine's pair of saved-tensor hooks is pushed; a pair around
    it gets everything that is no weight."""

    def __init__(
        self,
        onloaded_units: OnloadedUnits,
        saved: SavedTensors,
        backward: Backward,
        trainer: Trainer,
    ) -> None:
        self._onloaded_units, self._saved, self._backward = onloaded_units, saved, backward
        self._trainer, self._mine = trainer, _Stack()
        self._told_nested = False

    def push_root(self) -> None:
        """A forward of the whole model begins: what autograd saves between units may leave too."""
        if self._saved.saved_offloader is None or not torch_private.saved_tensor_hooks_allowed():
            return
        outer = self._saved.around(torch_private.top_saved_tensor_hooks())
        torch_private.push_saved_tensor_hooks(self._saved.packing(outer), self._saved.unpack)
        self._mine.roots += 1

    def pop_root(self) -> None:
        """It has ended, or raised."""
        if self._mine.roots and not self._mine.frames:
            self._mine.roots -= 1
            torch_private.pop_saved_tensor_hooks()

    def enter(self, unit: int) -> None:
        """Onload a unit whose forward begins.

        It may run inside another one although it is no part of it in the module tree, as adapters
        do that replace ``forward``: no plan has room for both, so the outer ones are offloaded
        then, and read op by op until they end.
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

    def push(self, unit: int, around: Around | None = None, *, away: bool = False) -> None:
        """The unit, which is open, runs from now on, until ``pop``, and so does what is ``around``
        it; ``away``: it is not that which lets it go."""
        outer = self._saved.around(torch_private.top_saved_tensor_hooks())
        frame = _Frame(unit, torch.is_autocast_cache_enabled(), around, away=away)
        torch_private.push_saved_tensor_hooks(self._saved.packing(outer), self._saved.unpack)
        if self._onloaded_units.streamed[unit]:  # a cast of what leaves would keep it
            torch.set_autocast_cache_enabled(False)
        self._mine.frames.append(frame)

    def may_run(self) -> bool:
        """Whether ``run`` can be used: what others do with saved tensors it cannot know of, but for
        checkpoints, which drop them."""
        top = torch_private.top_saved_tensor_hooks()
        known = top is None or self._saved.is_packing(top) or torch_private.of_checkpoint(top)
        return known and torch_private.saved_tensor_hooks_allowed()

    def run(self, unit: int, function: Callable[[], T]) -> T:
        """What ``function`` gives, which computes with weights of the unit, which is open, but is
        not a part of its forward."""
        top = torch_private.top_saved_tensor_hooks()
        if top is None or self._saved.is_packing(top):
            self.push(unit, away=True)  # whoever reads it has opened it, and closes it
            try:
                return function()
            finally:
                self._pop()
        # A checkpoint counts what is saved, here and when it computes again, where the unit may
        # be open for backward and nobody is asked.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return function()
        finally:
            torch.set_autocast_cache_enabled(cached)

    def pop(self, unit: int, *, completed: bool) -> int | None:
        """The unit runs no more, and is let go; the graph's clock when it began.  ``None``: it was
        not the innermost that runs.  Not ``completed``: it has raised."""
        stack = self._mine.frames
        if not stack or stack[-1].unit != unit:
            return None
        frame = self._pop(completed=completed)
        self._leave(frame)
        return frame.began

    def _leave(self, frame: _Frame) -> None:
        if not frame.away:
            self._onloaded_units.leave(frame.unit)

    def put_away(self) -> bool:
        """Lets the units go that run in this thread, for one that is read amid them and has no room
        beside them: until they end they are read as that one is.  ``False``: there is none, or what
        runs there reads parameters without asking."""
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
        # A backward that raised has taken its hooks with it.
        if frame.task == torch_private.current_graph_task():
            torch_private.pop_saved_tensor_hooks()
        if frame.around is not None:
            frame.around.end(completed=completed)
        torch.set_autocast_cache_enabled(frame.autocast_cache)
        return frame

    def backward_reads(self, unit: int) -> None:
        """Backward computes with a unit outside of its module: it stays open until it comes to
        another one."""
        self._backward.enter(unit)

    # -- after an exception ---------------------------------------------------------------------

    def tidy(self, *, reading: bool = False) -> None:
        """Closes what an interrupted forward, backward or read has left open, if none runs in this
        thread: whoever reads weights between forwards needs the room.  ``reading``: what is kept
        open for readers stays."""
        kept = not reading and self._onloaded_units.kept is not None
        if not (self._mine.frames or kept or self._onloaded_units.in_use):
            return
        self._trainer.require()
        if kept:
            self._onloaded_units.let_go()
        if not torch_private.in_backward() and not torch_private.in_module():
            self._clear()

    def make_room(self, module: nn.Module) -> None:
        """As ``tidy``, where ``module`` is about to run: maybe by itself, outside of the model's
        forward."""
        if (self._mine.frames or self._onloaded_units.in_use) and self._left_behind(module):
            self._clear()

    def _left_behind(self, module: nn.Module) -> bool:
        """Whether an exception has left open what is open when ``module`` is called: nothing that
        runs around it has opened it."""
        if torch_private.in_backward() or not self._trainer.alone():
            return False  # several threads may run parts of one forward: what is open is another's
        around = torch_private.modules_around(module)
        found = self._onloaded_units.parts.found
        mine = [found[frame.unit].module for frame in self._mine.frames]
        return around is not None and not any(m is other for m in mine for other in around)

    def begin(self) -> None:
        """A forward of the whole model begins: what an interrupted one left behind is closed."""
        if torch_private.in_backward():
            self._leave_all()
        else:
            self._clear()
            self._trainer.begins()

    def forget(self) -> None:
        """The engine ends: an exception may have left its hooks on this thread."""
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
        self._mine.roots = 0
