"""``model.state_dict()`` and ``load_state_dict()`` of a wrapped model: full, current weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from ..errors import OffloadError
from ..training.callers import callers
from ..training.handles import all_or_none, remove_all

if TYPE_CHECKING:
    from ..engine import Engine
    from .contents import Parts


class StateHooks:
    """Installs the hooks on every module that owns a managed parameter."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._index = {id(p): i for i, p in enumerate(engine.parts.parameters)}
        self._memo: dict[int, tuple[int, torch.Tensor]] = {}  # (version of the unit, weight)
        self._loading: tuple[nn.Module, Parts] | None = None  # what load_state_dict was called on
        self._handles: list[Any] = []
        model = engine.model
        # torch marks public hooks with an attribute, which bound methods cannot take.
        ours = {id(module) for module in model.modules()}

        def hook(method: Callable[..., None]) -> Callable[..., None]:
            me = weakref.WeakMethod(method)

            def hooked(module: nn.Module, *args: Any) -> None:
                mine = me()
                # A copy of a module has its hooks, and stands alone.
                if mine is not None and id(module) in ours:
                    mine(module, *args)

            return hooked

        forget, fill, load = hook(self._forget), hook(self._fill), hook(self._load)
        begin, end = hook(self._begin), hook(self._end)
        with all_or_none(self._handles):
            for module in model.modules():
                self._handles.append(module.register_load_state_dict_pre_hook(begin))
                self._handles.append(module.register_load_state_dict_post_hook(end))
                if any(id(p) in self._index for p in module.parameters(recurse=False)):
                    self._handles.append(module.register_state_dict_post_hook(fill))
                    self._handles.append(module.register_load_state_dict_pre_hook(load))
                self._handles.append(module.register_state_dict_pre_hook(forget))
                self._handles.append(module.register_state_dict_post_hook(forget))

    def remove(self) -> None:
        """Takes the hooks away."""
        remove_all(self._handles)

    def _alive(self) -> Engine:
        engine = self._engine()
        if engine is None or engine.closed:
            raise OffloadError("the engine is closed, so the model's weights are gone; call "
                               "overspill.unwrap(model) before close()")  # fmt: skip
        return engine

    def _owned(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in self._index:
                yield name, self._index[id(p)]

    def _forget(self, *_: Any) -> None:
        """A state dict begins, or ends: tied weights are one tensor in it, and none in others."""
        if _is_outermost():
            self._alive().trainer.require()  # before torch has read what shows
            self._memo.clear()

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        """torch has read parameters that are hidden; those that show are no copies yet."""
        engine = self._alive()
        engine.weights.settle()
        for name, index in self._owned(module):
            found = state.get(prefix + name)
            if found is None or isinstance(found, nn.Parameter):  # keep_vars: as it is
                continue
            version = engine.ledger.versions[engine.parts.unit_of[index]]
            if self._memo.get(index, (-1,))[0] != version:
                copy = engine.weights.copied(index, found)
                self._memo[index] = (version, copy)
            state[prefix + name] = self._memo[index][1]

    def _begin(
        self, module: nn.Module, state: dict[str, Any], prefix: str, meta: Mapping[str, Any],
        *_: Any,
    ) -> None:  # fmt: skip
        """All that is loaded is one edit: a part of it is not to be committed."""
        engine = self._alive()
        committing, loading = engine.committing, self._loading
        if committing and loading and loading[0] is not module and committing.is_open(loading[1]):
            # A part of that module; or, after a load that was interrupted, something that does not
            # make it whole.  A rollback does.
            return
        if meta.get("assign_to_params_buffers", False):
            raise OffloadError("load_state_dict(assign=True) would replace managed parameters")
        parts: dict[int, list[int]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            if id(p) in self._index and _takes(state.get(prefix + name), p):
                index = self._index[id(p)]
                parts.setdefault(engine.parts.unit_of[index], []).append(index)
        engine.weights.require_writable(parts)
        if committing is not None:
            self._loading = module, parts
            committing.begin_edit(parts)

    def _end(self, module: nn.Module, *_: Any) -> None:
        if self._loading is not None and self._loading[0] is module:
            committing = self._alive().committing
            assert committing is not None
            committing.end_edit(self._loading[1])
            self._loading = None

    def _load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any,
    ) -> None:  # fmt: skip
        engine = self._alive()
        engine.stepping.hide_all()  # torch then copies to no weight that shows
        for name, index in self._owned(module):
            value, p = state.get(prefix + name), engine.parts.parameters[index]
            if _takes(value, p):
                engine.weights.write(index, value)
                state[prefix + name] = p  # copying a parameter to itself does nothing


def _takes(value: Any, p: nn.Parameter) -> TypeGuard[torch.Tensor]:
    """Whether torch would copy a value of a state dict to a parameter."""
    return isinstance(value, torch.Tensor) and value.shape == p.shape and value is not p


def _is_outermost() -> bool:
    """Whether one ``state_dict`` runs, of the whole or of a part, and not one inside another."""
    asked = nn.Module.state_dict.__code__
    return sum(frame.f_code is asked for frame in callers()) <= 1


@contextmanager
def materialized(model: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
    """Gives every parameter its full, current weight, for code that reads or edits ``p.data``.

    Needs memory for the whole model on its device.  With ``writeback`` what was edited becomes
    the new weights (and masters); without, edits are dropped.

    Raises:
        OffloadError: the model is not wrapped, or is running.
    """
    engine: Engine | None = model.__dict__.get("_overspill_engine")
    if engine is None:
        raise OffloadError("the model is not wrapped by overspill")
    engine.raise_if_unusable()
    weights, params = engine.weights, engine.parts.parameters
    full = [weights.read(index) for index in range(len(params))]
    given = False
    try:
        engine.materialized = True
        engine.residences.give_away(full)
        given = True
        yield model
    finally:
        engine.returning = True
        edited = {index: p.data for index, p in enumerate(params)} if given else {}
        engine.dematerialize()
        if writeback and not engine.closed:
            # Only what was edited: a bf16 weight written back would round its master.
            changed = {
                index: value
                for index, value in edited.items()
                if not torch.equal(value, weights.read(index))
            }
            weights.write_all(changed)


__all__ = ["StateHooks", "materialized"]
