"""Module hooks, which onload units before they run and release them afterwards.

Hooks on the outputs fetch a unit again before its backward. Correctness never depends on a backward
hook having fired.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..activations.activation_tuner import ActivationTuner
from ..activations.offloader import NOWHERE
from ..facts.trace import Trace
from ..logits.deferred import DeferredLogits
from ..params.backward import Backward
from ..params.onloaded_units import OnloadedUnits
from ..planning.models import entries
from ..planning.stand_ins import hooked_model
from ..planning.unit_discovery import direct_parameters, read_ahead
from ..private import torch_private
from ..private.compile_private import not_compiled, not_in_graphs
from ..private.handles import all_or_none, remove_all
from .forward_stack import ForwardStack, Inputs

Hook = Callable[[nn.Module, Any], None]


class Occasions(Protocol):
    """The engine's reactions to points in the user's training loop."""

    def require(self) -> None:
        """Raise if the engine cannot be used."""

    def before_forward(self) -> None:
        """React to the start of a forward of a whole model, outside of any backward."""

    def catch_up(self, unit: int) -> None:
        """Bring a unit up to date before a module runs that reads its weights."""

    def catch_up_again(self, unit: int) -> None:
        """Call ``catch_up``, unless nothing can have changed since the last call for this unit."""

    def after_forward(self) -> None:
        """React to the end of a forward of a whole model."""


class ModuleHooks:
    """The hooks on units, on modules that read their weights, and on entries."""

    def __init__(
        self,
        model: nn.Module,
        onloaded_units: OnloadedUnits,
        backward: Backward,
        forward_stack: ForwardStack,
        trace: Trace,
        loop: Occasions,
        tuner: ActivationTuner,
    ) -> None:
        """Install the hooks."""
        self._saved_offloader, self._recompute = tuner.saved_offloader, tuner.recompute
        self._onloaded_units, self._backward, self._forward_stack = (
            onloaded_units,
            backward,
            forward_stack,
        )
        hooked = onloaded_units.parts.hooked
        # By unit, whether these hooks bring weights to its module.
        self._hooked = [not hooked.isdisjoint(group) for group in onloaded_units.groups]
        self._moves = any(onloaded_units.moves)
        self._trace, self._loop = trace, loop
        self.catch_up_again = loop.catch_up_again
        self._handles: list[Any] = []
        with all_or_none(self._handles):
            self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        me, hooked = weakref.ref(self), dict[nn.Module, int]()
        for unit, found in self._onloaded_units.parts.running:
            whole = not found.direct_only and self._saved_offloader is not None
            if self._onloaded_units.moves[unit] or unit in self._recompute.able or whole:
                self._hook_unit(me, unit, found.module)
                if self._hooked[unit]:
                    hooked[found.module] = unit
            elif self._saved_offloader is not None:
                self._hook_border(me, unit, found.module)
        of_weights = hooked_model(model)
        self._hook_readers(me, of_weights, hooked)
        self._hook_read_ahead(me, of_weights)
        if self._onloaded_units.accelerator.stream() is not None:
            self._hook_streams(me, of_weights)
        if self._onloaded_units.parts.external:
            return
        for entry in entries(model).values():
            before = _root_before(me)
            hook = entry.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            self._handles.append(hook)
            self._handles.append(entry.register_forward_hook(_root_after(me), always_call=True))

    def _hook_border(self, me: weakref.ref[ModuleHooks], unit: int, module: nn.Module) -> None:
        """Hook a resident unit, to attribute to it what autograd saves while it runs."""
        own = id(module)

        def after(called: nn.Module, _args: Any, _output: Any) -> None:
            hooks = me()
            if hooks is not None and id(called) == own:
                hooks.ran()

        def before(called: nn.Module, _args: Any) -> None:
            hooks = me()
            if hooks is not None and id(called) == own:
                hooks.runs(unit)

        self._handles.append(module.register_forward_pre_hook(not_in_graphs(before), prepend=True))
        if self._saved_offloader is not None and self._saved_offloader.precision:
            end = module.register_forward_hook(not_in_graphs(after), always_call=True)
            self._handles.append(end)

    def _hook_unit(self, me: weakref.ref[ModuleHooks], unit: int, module: nn.Module) -> None:
        own = id(module)  # copies of the module share its hooks, but not the engine

        @not_compiled
        def before(called: nn.Module, args: Any, kwargs: Any) -> None:
            hooks = me()
            if hooks is not None and id(called) == own:
                hooks.before_forward(unit, called, args, kwargs)

        @not_compiled
        def after(called: nn.Module, _args: Any, output: Any) -> None:
            hooks = me()
            if hooks is not None and id(called) == own:
                hooks.after_forward(unit, output)

        hook = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._handles.append(hook)
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _hook_readers(
        self, me: weakref.ref[ModuleHooks], model: nn.Module, hooked: Mapping[nn.Module, int]
    ) -> None:
        """Make modules that may read weights of resident units wait for their update.

        These are the unit's own module and all modules, anywhere in the model, that hold a
        parameter of it.

        Args:
            hooked: by module, the unit that its hooks bring up to date; it needs no other hook.
        """
        parts = self._onloaded_units.parts
        index_of = {id(p): index for index, p in enumerate(parts.parameters)}
        readers: dict[nn.Module, set[int]] = {}
        for unit, found in parts.running:
            if not found.direct_only:
                readers.setdefault(found.module, set()).update(self._onloaded_units.groups[unit])
        for module in model.modules():
            mine = {parts.unit_of[index_of[id(p)]] for p in direct_parameters(module)
                    if id(p) in index_of}  # fmt: skip
            readers.setdefault(module, set()).update(mine)
        inside = [
            set() if found.direct_only else set(found.module.modules()) - {found.module}
            for found in parts.found
        ]
        for module, units in readers.items():
            units &= parts.hooked
            resident = tuple(sorted(u for u in units if self._onloaded_units.fixed[u]))
            if resident and resident != (hooked.get(module),):
                hook = _reader(me, id(module), resident)
                inner = all(module in inside[unit] for unit in resident)
                hook = not_in_graphs(hook) if inner else not_compiled(hook)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _hook_read_ahead(self, me: weakref.ref[ModuleHooks], model: nn.Module) -> None:
        """Hook modules that inspect the parameters of a child before they call it.

        An offloaded parameter has a class of its own, which such a module takes for a reason to
        choose another algorithm, so the child's units are onloaded first.
        """
        parts = self._onloaded_units.parts
        index_of = {id(p): index for index, p in enumerate(parts.parameters)}
        for module in model.modules():
            if (child := read_ahead(module)) is None:
                continue
            units = {parts.unit_of[index_of[id(p)]] for p in child.parameters()
                     if id(p) in index_of}  # fmt: skip
            inside = any(module in found.module.modules() for _, found in parts.running
                         if not found.direct_only)  # fmt: skip
            if units and not inside:
                hook = not_compiled(_before_reading_ahead(me, id(module), units))
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _hook_streams(self, me: weakref.ref[ModuleHooks], model: nn.Module) -> None:
        """Hook modules inside of a unit, which may run on streams of their own.

        Their use of weights is recorded even if autograd saves none of them.
        """
        parts = self._onloaded_units.parts
        index_of = {id(p): index for index, p in enumerate(parts.parameters)}
        roots = {id(found.module) for found in parts.found}
        for module in model.modules():
            mine = {parts.unit_of[index_of[id(p)]] for p in direct_parameters(module)
                    if id(p) in index_of}  # fmt: skip
            moving = tuple(sorted(u for u in mine if self._onloaded_units.streamed[u]))
            if moving and id(module) not in roots:
                hook = not_in_graphs(_stream_reader(me, id(module), moving))
                self._handles.append(module.register_forward_pre_hook(hook))

    # -- units ----------------------------------------------------------------------------------

    def runs(self, unit: int) -> None:
        """Attribute to this unit what autograd saves from now on."""
        if self._saved_offloader is not None:
            self._saved_offloader.enter(unit)

    def never_offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """See ``SavedTensorOffloader.never_offload``."""
        if self._saved_offloader is not None:
            self._saved_offloader.never_offload(tensors)

    def ran(self) -> None:
        """Record that the forward of a unit has ended."""
        if self._saved_offloader is not None:
            self._saved_offloader.computed()

    def before_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Prepare for the run of a unit's module: onload the unit and push its frame."""
        self.runs(unit)
        self._forward_stack.make_room(module)
        if self._hooked[unit]:
            self._loop.catch_up(unit)
            if torch_private.in_backward():
                self._backward.recomputes(unit)
        around = self._recompute.begin(unit, module, args, kwargs)
        try:
            if self._hooked[unit]:
                self._forward_stack.enter(unit)
            self._forward_stack.push(unit, around, away=not self._hooked[unit])
        except BaseException:
            if around is not None:
                around.end(completed=False)
            raise
        if self._saved_offloader is not None:
            self._saved_offloader.computes()

    def after_forward(self, unit: int, output: Any) -> None:
        """Finish a run of the unit's module; ``output`` is ``None`` if it raised."""
        if self._saved_offloader is not None:
            self._saved_offloader.computed()
        self.ran()
        began = self._forward_stack.pop(unit, completed=output is not None)
        if began is None or output is None:
            return
        self._forward_stack.returned(output)
        if torch.is_grad_enabled() and self._moves:
            backward = self._backward
            for t in differentiable(output):
                if torch_private.made_since(t, began):  # and not an input that was passed through
                    t.register_hook(lambda _grad: backward.enter(unit))
        # Not after an exception: torch might suppress this error.
        self._onloaded_units.refuse_edits()

    def open_ahead(self, units: Collection[int]) -> None:
        """Onload units whose parameters are about to be inspected before they are computed with."""
        if not torch_private.in_backward():
            for unit in units:
                self._loop.catch_up(unit)
                self._onloaded_units.open_ahead(unit)

    # -- entries --------------------------------------------------------------------------------

    def before_root(self, model: nn.Module | None = None, inputs: Inputs | None = None) -> None:
        """Begin a forward of a whole model, and clear what an interrupted one left open.

        Args:
            model: the entry that was called, if it was called as a module.
            inputs: its arguments.
        """
        self._loop.require()
        if model is not None and self._forward_stack.begins_inside(model):
            return
        self._forward_stack.begin()
        self.ran()
        if not torch_private.in_backward():
            self._loop.before_forward()
        self._trace.compute_resume("model")
        self._forward_stack.push_root(inputs)

    def use_here(self, units: Sequence[int]) -> None:
        """Record that the current stream uses these units, which a module is about to read."""
        self._onloaded_units.use_here(units)

    def after_root(self, output: Any, model: nn.Module | None = None) -> None:
        """End a forward of a whole model; ``output`` is ``None`` if it raised.

        Hooks on the outputs mark the outermost backward pass as open as soon as it starts.
        """
        if model is not None and self._forward_stack.ends_inside(model):
            return
        self._forward_stack.pop_root(completed=output is not None)
        self.runs(NOWHERE)
        if output is not None and torch.is_grad_enabled():
            backward = self._backward
            for t in differentiable(output):
                t.register_hook(lambda _grad: backward.opened())
        self._loop.after_forward()
        if output is not None:
            self._onloaded_units.refuse_edits()

    def remove(self) -> None:
        """Remove all hooks."""
        remove_all(self._handles)


def _reader(me: weakref.ref[ModuleHooks], own: int, units: Sequence[int]) -> Hook:
    def before(called: nn.Module, _args: Any) -> None:
        hooks = me()
        if hooks is not None and id(called) == own:
            for unit in units:
                hooks.catch_up_again(unit)

    return before


def _before_reading_ahead(me: weakref.ref[ModuleHooks], own: int, units: Collection[int]) -> Hook:
    def before(called: nn.Module, _args: Any) -> None:
        hooks = me()
        if hooks is not None and id(called) == own and not called.training:
            hooks.open_ahead(units)

    return before


def _stream_reader(me: weakref.ref[ModuleHooks], own: int, units: Sequence[int]) -> Hook:
    def before(called: nn.Module, _args: Any) -> None:
        hooks = me()
        if hooks is not None and id(called) == own:
            hooks.use_here(units)

    return before


def _root_before(me: weakref.ref[ModuleHooks]) -> Callable[[nn.Module, Any, Any], None]:
    @not_compiled
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        hooks = me()
        if hooks is not None:
            hooks.before_root(module, (args, kwargs))

    return before


def _root_after(me: weakref.ref[ModuleHooks]) -> Callable[[nn.Module, Any, Any], None]:
    @not_compiled
    def after(module: nn.Module, _args: Any, output: Any) -> None:
        hooks = me()
        if hooks is not None:
            hooks.after_root(output, module)

    return after


def differentiable(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``output`` through which gradients will flow."""
    leaves = [output] if isinstance(output, torch.Tensor) else torch_private.tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, DeferredLogits):
            leaf = leaf.source.hidden  # every gradient of the logits comes there
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            yield leaf
