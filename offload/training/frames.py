"""The units whose forward runs now, and what an exception has left open of them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from . import torch_private
from .backward import Backward
from .residences import Residences
from .saved import SavedTensors
from .trainer import Trainer


class _Frame:
    """One unit whose forward runs in this thread."""

    __slots__ = ("autocast_cache", "outer", "unit")

    def __init__(self, unit: int, outer: tuple[Any, Any] | None, autocast_cache: bool) -> None:
        self.unit, self.outer, self.autocast_cache = unit, outer, autocast_cache


class _Stack(threading.local):
    """The units that run in the present thread, outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


class Frames:
    """Around each unit's forward the engine's pair of saved-tensor hooks is pushed; a pair around
    it gets everything that is no weight."""

    def __init__(
        self, residences: Residences, saved: SavedTensors, backward: Backward, trainer: Trainer
    ) -> None:
        self._residences, self._saved, self._backward = residences, saved, backward
        self._trainer, self._mine = trainer, _Stack()

    def push(self, unit: int) -> None:
        """The unit, which is open, runs from now on."""
        stack = self._mine.frames
        outer = stack[-1].outer if stack else torch_private.top_saved_tensor_hooks()
        frame = _Frame(unit, outer, torch.is_autocast_cache_enabled())
        torch_private.push_saved_tensor_hooks(self._saved.packing(outer), self._saved.unpack)
        torch.set_autocast_cache_enabled(False)
        stack.append(frame)

    def pop(self, unit: int) -> bool:
        """Whether the unit was the innermost that runs; it does so no more."""
        stack = self._mine.frames
        found = bool(stack) and stack[-1].unit == unit
        if found:
            self._pop()
        return found

    def _pop(self) -> _Frame:
        frame = self._mine.frames.pop()
        torch_private.pop_saved_tensor_hooks()
        torch.set_autocast_cache_enabled(frame.autocast_cache)
        return frame

    # -- after an exception ---------------------------------------------------------------------

    def tidy(self) -> None:
        """Closes what an interrupted forward, backward or read has left open, if none runs in this
        thread: whoever reads weights between forwards needs the room."""
        if not self._mine.frames and not self._residences.in_use:
            return
        self._trainer.require()
        if not torch_private.in_backward() and not torch_private.in_module():
            self._clear()

    def make_room(self, module: nn.Module) -> None:
        """As ``tidy``, where ``module`` is about to run: maybe by itself, outside of the model's
        forward."""
        if (self._mine.frames or self._residences.in_use) and self._left_behind(module):
            self._clear()

    def _left_behind(self, module: nn.Module) -> bool:
        """Whether an exception has left open what is open when ``module`` is called: nothing that
        runs around it has opened it."""
        if torch_private.in_backward():
            return False
        around = torch_private.modules_around(module)
        found = self._residences.parts.found
        mine = [found[frame.unit].module for frame in self._mine.frames]
        return around is not None and not any(m is other for m in mine for other in around)

    def begin(self) -> None:
        """A forward of the whole model begins: what an interrupted one left behind is closed."""
        if torch_private.in_backward():
            self._leave_all()
        else:
            self._clear()

    def _clear(self) -> None:
        self._leave_all()
        self._backward.abandon()
        self._residences.reset()

    def _leave_all(self) -> None:
        while self._mine.frames:
            self._residences.leave(self._pop().unit)
        while self._saved.is_packing(torch_private.top_saved_tensor_hooks()):
            torch_private.pop_saved_tensor_hooks()
