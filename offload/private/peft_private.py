"""Adapters of peft over single parameters (``target_parameters``), such as stacks of experts.

While its layer runs, such an adapter replaces the parameter by a parametrisation, which is another
object, and puts the parameter back afterwards.  The engine manages parameters by identity, and owns
their memory.  So the parametrisation is set up on a module that only has a view of the weight, and
the layer gets the result as an attribute, which Python finds before the parameter.

A stack that was split into sections is a module in the parameter's place.  It adds the product of
the adapter's factors to its matrices, one section at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..errors import ModelError
from .module_private import own_parameters

_LAYERS = "peft.tuners.lora.layer"
# The models that adapt single parameters: module and class.
_MODELS = ("peft.tuners.lora.model", "LoraModel"), ("peft.tuners.mixed.model", "MixedModel")
Activate = Callable[[Any, list[str]], contextlib.AbstractContextManager[None]]


def wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that adapt a single parameter, by name."""
    kind: Any = getattr(sys.modules.get(_LAYERS), "ParamWrapper", None)
    if kind is not None:
        yield from ((name, each) for name, each in model.named_modules() if isinstance(each, kind))


def adapted(wrapper: Any) -> Any:
    """Return what such a module adapts: a parameter, or what took its place."""
    layer = wrapper.get_base_layer()
    found = own_parameters(layer).get(wrapper.parameter_name)
    return getattr(layer, wrapper.parameter_name, None) if found is None else found


def keep_merged(model: nn.Module) -> Callable[[], None]:
    """Return a function that makes layers forget the adapters that were merged into them since."""
    lists = [vars(module).get("merged_adapters") for module in model.modules()]
    found = [(names, list(names)) for names in lists if isinstance(names, list)]

    def restore() -> None:
        for names, before in found:
            names[:] = before

    return restore


def missed(model: nn.Module, targets: Iterable[str], split: Any) -> str | None:
    """Return the name of a stack in sections (modules of class ``split``) that adapters are meant
    for, by peft's rules; ``None`` if there is none.  peft finds parameters alone."""
    for name, module in model.named_modules():
        before: str = name.replace(".base_layer", "")
        if isinstance(module, split) and any(f".{before}".endswith(f".{t}") for t in targets):
            return before
    return None


def prepare(is_managed: Callable[[Any], object], split: Any) -> None:
    """Let adapters leave parameters in place for which ``is_managed`` holds, and add to stacks that
    are in sections: modules of class ``split``."""
    if _LAYERS in sys.modules:
        _keep_parameters(is_managed, split)
        for module, name in _MODELS:
            _refuse_for_sections(getattr(importlib.import_module(module), name), split)


@functools.cache
def _keep_parameters(is_managed: Callable[[Any], object], split: Any) -> None:
    kind: Any = importlib.import_module(_LAYERS).ParamWrapper
    original: Activate = kind._activate_lora

    def activate(self: Any, adapters: list[str]) -> contextlib.AbstractContextManager[None]:
        found = adapted(self)
        if isinstance(found, split):
            return _InSections(self, found, adapters)
        if is_managed(found):
            return _Beside(self, adapters, original)
        return original(self, adapters)

    kind._activate_lora = activate


@functools.cache
def _refuse_for_sections(tuner: Any, split: Any) -> None:
    """Refuse, before anything is changed, what peft does to whole stacks only."""
    for name in ("merge_adapter", "_unload_and_optionally_merge"):
        setattr(tuner, name, _unless_in_sections(getattr(tuner, name), split))
    inject = tuner.inject_adapter

    @functools.wraps(inject)
    def checked(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        targets = getattr(self.peft_config[adapter_name], "target_parameters", None) or ()
        if (name := missed(model, targets, split)) is not None:
            raise ModelError(
                f"{name} is in sections, where peft does not find it; add adapters before "
                "split_experts, or call join_experts(model) first"
            )
        return inject(self, model, adapter_name, *args, **kwargs)

    tuner.inject_adapter = checked


def _unless_in_sections(method: Callable[..., Any], split: Any) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.get("merge", True):
            for _, wrapper in wrappers(self.model):
                named = bound.arguments.get("adapter_names")
                merged = wrapper.active_adapters if named is None else named
                if isinstance(adapted(wrapper), split) and not wrapper.lora_A.keys().isdisjoint(
                    merged
                ):
                    raise ModelError(
                        f"an adapter cannot be merged into {wrapper.parameter_name!r}, which is in "
                        "sections; call overspill.unwrap(model) and join_experts(model) first"
                    )
        return method(self, *args, **kwargs)

    return checked


class _Beside:
    """The context in which a layer computes with an adapted weight."""

    def __init__(self, wrapper: Any, adapters: list[str], activate: Activate) -> None:
        self._layer, self._name = wrapper.get_base_layer(), wrapper.parameter_name
        weight = adapted(wrapper)
        if weight.requires_grad:
            raise ModelError(
                f"parameter {self._name!r} was set to require gradients after wrap, and adapters "
                "of target_parameters are added to it; freeze it (requires_grad_(False))"
            )
        self._holder = holder = nn.Module()
        holder.register_parameter(self._name, nn.Parameter(weight.detach(), requires_grad=False))
        own = copy.copy(wrapper)  # whose layer is the holder
        own.__dict__["get_base_layer"] = lambda: holder
        self._inner = activate(own, adapters)

    def __enter__(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._inner)
            undo.callback(self._layer.__dict__.pop, self._name, None)
            self._layer.__dict__[self._name] = getattr(self._holder, self._name)
            self._undo = undo.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._undo.__exit__(*error)


class _InSections:
    """The context in which a layer computes with an adapted stack that is in sections."""

    def __init__(self, wrapper: Any, stack: Any, adapters: list[str]) -> None:
        mine = [name for name in adapters if name in wrapper.lora_A]
        if len(mine) > 1:
            raise ModelError(
                f"{', '.join(mine)} are active at once, and add to {wrapper.parameter_name!r}, "
                "which is in sections; activate one adapter at a time"
            )
        self._stack = stack
        self._factors = wrapper.get_delta_factors(*mine) if mine else None

    def __enter__(self) -> None:
        if self._factors is not None:
            self._stack.add(*self._factors)

    def __exit__(self, *error: Any) -> None:
        self._stack.add_nothing()
