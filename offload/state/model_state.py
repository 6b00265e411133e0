"""``model.state_dict()`` and ``load_state_dict()`` of a wrapped model: full, current weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from ..errors import LifecycleError, WeightError
from ..movement.runtime import Runtime
from ..params.conversions import in_engine
from ..params.resident_param_guard import ResidentParamGuard
from ..planning.sections import has_sections, split_in
from ..private.handles import all_or_none, remove_all
from ..private.reentrancy import callers
from ..private.trainer import Trainer
from .contents import EditedParts
from .param_access import ParamAccess


class HalfEdits(Protocol):
    """The part of commits that loading uses: no commit may happen while a dict is half loaded."""

    def begin_edit(self, parts: EditedParts) -> None: ...

    def is_open(self, parts: EditedParts) -> bool: ...

    def end_edit(self, parts: EditedParts) -> None: ...


class StateHooks:
    """Installs state-dict hooks on the modules of a wrapped model.

    Pre-hooks check and prepare, post-hooks fill in current weights for each managed parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        weights: ParamAccess,
        resident_guard: ResidentParamGuard,
        trainer: Trainer,
        commits: HalfEdits | None,
    ) -> None:
        self._runtime, self._parts = runtime, runtime.parts
        self._weights, self._resident_guard = weights, resident_guard
        self._trainer, self._commits = trainer, commits
        self._index = {id(p): i for i, p in enumerate(self._parts.parameters)}
        self._memo: dict[int, tuple[int, torch.Tensor]] = {}  # (version of the unit, weight)
        self._loading: tuple[nn.Module, EditedParts] | None = (
            None  # the module that load_state_dict was called on
        )
        self._handles: list[Any] = []
        # torch marks public hooks with an attribute, which bound methods cannot take.
        self._ours = ours = {id(module) for module in model.modules()}

        def hook(method: Callable[..., None]) -> Callable[..., None]:
            me = weakref.WeakMethod(method)

            def hooked(module: nn.Module, *args: Any) -> None:
                mine = me()
                # A copied module has the hooks too, but is not part of this model.
                if mine is not None and id(module) in ours:
                    mine(module, *args)

            return hooked

        read, forget, fill = hook(self._begin_dict), hook(self._forget), hook(self._fill)
        load, begin, end = hook(self._load), hook(self._begin), hook(self._end)
        with all_or_none(self._handles):
            for module in model.modules():
                if has_sections(module):  # also in modules added around them after the split
                    self._handles.append(module.register_load_state_dict_pre_hook(split_in))
                self._handles.append(module.register_load_state_dict_pre_hook(begin))
                self._handles.append(module.register_load_state_dict_post_hook(end))
                if any(id(p) in self._index for p in module.parameters(recurse=False)):
                    self._handles.append(module.register_state_dict_post_hook(fill))
                    self._handles.append(module.register_load_state_dict_pre_hook(load))
                self._handles.append(module.register_state_dict_pre_hook(read))
                self._handles.append(module.register_state_dict_post_hook(forget))

    def remove(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)

    def _require_open(self) -> None:
        if self._runtime.closed:
            raise LifecycleError("the engine is closed, so the model's weights are gone; call "
                               "overspill.unwrap(model) before close()")  # fmt: skip

    def _owned(self, module: nn.Module) -> Iterator[tuple[str, int]]:
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in self._index and in_engine(p):
                yield name, self._index[id(p)]

    def _begin_dict(self, *_: Any) -> None:
        """Write changes made to earlier state dicts, before a new one is filled."""
        if self._is_outermost():
            self._forget()
            self._weights.reconcile(compare=range(len(self._parts.units)))

    def _forget(self, *_: Any) -> None:
        """Clear the memo at the start and end of a state dict.

        Tied weights are one tensor within a dict, but separate tensors in different dicts.
        """
        if self._is_outermost():
            self._require_open()
            self._trainer.require()  # before torch reads visible parameters
            self._weights.tidy()
            self._memo.clear()

    def _is_outermost(self) -> bool:
        """Return whether the running ``state_dict`` call is not nested in another one.

        Calls on modules around the model do not count.
        """
        inside = 0
        for frame in callers():
            if frame.f_code is nn.Module.state_dict.__code__:
                inside += id(frame.f_locals.get("self")) in self._ours
        return inside <= 1

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        """Replace placeholders, and weights that are not copies yet, by copies of the weights."""
        self._require_open()
        self._weights.reconcile()
        for name, index in self._owned(module):
            found = state.get(prefix + name)
            if found is None or isinstance(found, nn.Parameter):  # keep_vars: left as it is
                continue
            version = self._runtime.ledger.versions[self._parts.unit_of[index]]
            if self._memo.get(index, (-1,))[0] != version:
                copy = self._weights.copied(index, found)
                self._memo[index] = (version, copy)
                self._weights.lend_in_dict(index, copy, state)
            state[prefix + name] = self._memo[index][1]

    def _begin(
        self, module: nn.Module, state: dict[str, Any], prefix: str, meta: Mapping[str, Any],
        *_: Any,
    ) -> None:  # fmt: skip
        """Begin one edit for everything that is loaded, so that no commit has only a part of it."""
        self._require_open()
        commits, loading = self._commits, self._loading
        if commits and loading and loading[0] is not module and commits.is_open(loading[1]):
            # `module` is a part of the module being loaded. Or that load was interrupted, and this
            # one does not make it whole; a rollback does.
            return
        if meta.get("assign_to_params_buffers", False):
            raise WeightError(
                "load_state_dict(assign=True) would replace parameters that the engine manages; "
                "load without assign=True, or call overspill.unwrap(model) first"
            )
        parts: dict[int, list[int]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            if id(p) in self._index and in_engine(p) and _takes(state.get(prefix + name), p):
                index = self._index[id(p)]
                parts.setdefault(self._parts.unit_of[index], []).append(index)
        for name, p in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if id(p) in self._index and in_engine(p) and _takes(value, p):
                self._weights.require_same(self._index[id(p)], value)
        self._weights.require_writable(parts)
        if commits is not None:
            self._loading = module, parts
            commits.begin_edit(parts)

    def _end(self, module: nn.Module, *_: Any) -> None:
        if self._loading is not None and self._loading[0] is module:
            self._require_open()
            assert self._commits is not None
            self._commits.end_edit(self._loading[1])
            self._loading = None

    def _load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any,
    ) -> None:  # fmt: skip
        self._require_open()
        self._resident_guard.hide_all()  # so torch copies to no visible weight
        if not _runs(nn.Module.load_state_dict.__code__):
            return  # the dict is the loader's own: torch copies each value to a hidden parameter
        for name, index in self._owned(module):
            value, p = state.get(prefix + name), self._parts.parameters[index]
            if _takes(value, p):
                self._weights.write(index, value)
                state[prefix + name] = p  # copying a parameter to itself does nothing


def _takes(value: Any, p: nn.Parameter) -> TypeGuard[torch.Tensor]:
    """Return whether torch would copy a value of a state dict to a parameter."""
    return isinstance(value, torch.Tensor) and value.shape == p.shape and value is not p


def _runs(method: CodeType) -> int:
    """Return how often a method is among the callers."""
    return sum(frame.f_code is method for frame in callers())
