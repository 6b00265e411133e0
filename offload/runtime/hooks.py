"""All module hooks: units are fetched before they run, and let go after.

Around each unit's forward the engine's pair of saved-tensor hooks is pushed (an enclosing pair
gets everything that is no weight).  Hooks on the outputs fetch a unit again before its backward.
Nothing's correctness depends on a backward hook having fired.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..observe.trace import Trace
from . import torch_private
from .backward import Backward
from .residences import Residences
from .saved import SavedTensors


class _Frame:
    """One unit whose forward runs in this thread."""

    __slots__ = ("autocast_cache", "outer", "unit")

    def __init__(self, unit: int, outer: tuple[Any, Any] | None, autocast_cache: bool) -> None:
        self.unit, self.outer, self.autocast_cache = unit, outer, autocast_cache


class _Frames(threading.local):
    """The units that run in the present thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []


class ModuleHooks:
    """Installs hooks on the streamed units and on the root; ``remove`` takes all away."""

    def __init__(
        self,
        model: nn.Module,
        residences: Residences,
        saved: SavedTensors,
        backward: Backward,
        trace: Trace,
        alive: Callable[[], None],
        catch_up: Callable[[int], None] | None,
        seal: Callable[[], None] | None = None,
    ) -> None:
        self._residences, self._saved, self._backward = residences, saved, backward
        self._trace, self._alive, self._catch_up = trace, alive, catch_up
        self._seal = seal  # called when a forward that trains begins
        self._frames = _Frames()
        self._handles: list[Any] = []
        me = weakref.ref(self)
        for unit, found in enumerate(residences.parts.found):
            if residences.streamed[unit]:
                self._hook_unit(me, unit, found.module)
            elif catch_up is not None:
                self._hook_resident(catch_up, unit, found.module)
        self._handles.append(model.register_forward_pre_hook(_root_before(me), prepend=True))
        self._handles.append(model.register_forward_hook(_root_after(me)))

    def _hook_unit(self, me: weakref.ref[ModuleHooks], unit: int, module: nn.Module) -> None:
        @torch_private.not_compiled
        def before(_module: nn.Module, _args: Any) -> None:
            hooks = me()
            if hooks is not None:
                hooks.before_forward(unit)

        @torch_private.not_compiled
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            hooks = me()
            if hooks is not None:
                hooks.after_forward(unit, output)

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _hook_resident(self, catch_up: Callable[[int], None], unit: int, module: nn.Module) -> None:
        """Whoever calls a module that owns weights of the unit waits for their update."""
        own = {id(p) for p in self._residences.params_of(unit)}

        @torch_private.not_compiled
        def before(_module: nn.Module, _args: Any) -> None:
            catch_up(unit)

        for part in module.modules():
            if any(id(p) in own for p in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_pre_hook(before, prepend=True))

    # -- units ----------------------------------------------------------------------------------

    def before_forward(self, unit: int) -> None:
        """The unit's module is about to run."""
        if self._catch_up is not None:
            self._catch_up(unit)
        self._residences.enter(unit)
        stack = self._frames.stack
        outer = stack[-1].outer if stack else torch_private.top_saved_tensor_hooks()
        frame = _Frame(unit, outer, torch.is_autocast_cache_enabled())
        pack, unpack = (None, None) if outer is None else outer
        saved = self._saved
        torch_private.push_saved_tensor_hooks(lambda t: saved.pack(t, pack, unpack), saved.unpack)
        torch.set_autocast_cache_enabled(False)
        stack.append(frame)

    def after_forward(self, unit: int, output: Any) -> None:
        """The unit's module has run, or raised."""
        stack = self._frames.stack
        if not stack or stack[-1].unit != unit:
            return
        self._pop()
        if output is not None and torch.is_grad_enabled():
            backward = self._backward
            for t in differentiable(output):
                t.register_hook(lambda _grad: backward.enter(unit))
        self._residences.leave(unit)

    def _pop(self) -> _Frame:
        frame = self._frames.stack.pop()
        torch_private.pop_saved_tensor_hooks()
        torch.set_autocast_cache_enabled(frame.autocast_cache)
        return frame

    # -- the root -------------------------------------------------------------------------------

    def before_root(self) -> None:
        """A forward of the whole model begins: clears what an interrupted one left behind."""
        self._alive()
        while self._frames.stack:
            self._residences.leave(self._pop().unit)
        if torch_private.current_graph_task() < 0:
            self._backward.abandon()
            if self._seal is not None and torch.is_grad_enabled():
                self._seal()
        self._trace.compute_resume("model")

    def after_root(self, output: Any) -> None:
        """Marks the outermost backward pass as open as soon as it starts."""
        if torch.is_grad_enabled():
            backward = self._backward
            for t in differentiable(output):
                t.register_hook(lambda _grad: backward.opened())

    def remove(self) -> None:
        """Takes all hooks away."""
        while self._handles:
            self._handles.pop().remove()


def _root_before(me: weakref.ref[ModuleHooks]) -> Callable[[nn.Module, Any], None]:
    @torch_private.not_compiled
    def before(_module: nn.Module, _args: Any) -> None:
        hooks = me()
        if hooks is not None:
            hooks.before_root()

    return before


def _root_after(me: weakref.ref[ModuleHooks]) -> Callable[[nn.Module, Any, Any], None]:
    @torch_private.not_compiled
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        hooks = me()
        if hooks is not None:
            hooks.after_root(output)

    return after


def differentiable(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``output`` through which gradients will come."""
    leaves = [output] if isinstance(output, torch.Tensor) else torch_private.tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            yield leaf
