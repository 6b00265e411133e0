"""Adapters of peft over single parameters (``target_parameters``), such as stacks of experts.

While its layer runs, such an adapter replaces the parameter by a parametrisation, which is another
object, and puts the parameter back afterwards.  The engine manages parameters by identity, and owns
their memory.  So the parametrisation is set up on a module that only has a view of the weight, and
the layer gets the result as an attribute, which Python finds before the parameter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_LAYERS = "peft.tuners.lora.layer"
Activate = Callable[[Any, list[str]], contextlib.AbstractContextManager[None]]


def wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that adapt a single parameter, by name."""
    kind: Any = getattr(sys.modules.get(_LAYERS), "ParamWrapper", None)
    if kind is not None:
        yield from ((name, each) for name, each in model.named_modules() if isinstance(each, kind))


def adapted(wrapper: Any) -> Any:
    """Return what such a module adapts: a parameter, or what took its place."""
    return getattr(wrapper.get_base_layer(), wrapper.parameter_name, None)


def prepare(model: nn.Module, is_managed: Callable[[Any], object]) -> None:
    """Let adapters leave parameters in place for which ``is_managed`` holds."""
    if next(wrappers(model), None) is not None:
        _keep_parameters(is_managed)


@functools.cache
def _keep_parameters(is_managed: Callable[[Any], object]) -> None:
    kind: Any = importlib.import_module(_LAYERS).ParamWrapper
    original: Activate = kind._activate_lora

    def activate(self: Any, adapters: list[str]) -> contextlib.AbstractContextManager[None]:
        if is_managed(adapted(self)):
            return _Beside(self, adapters, original)
        return original(self, adapters)

    kind._activate_lora = activate


class _Beside:
    """The context in which a layer computes with an adapted weight."""

    def __init__(self, wrapper: Any, adapters: list[str], activate: Activate) -> None:
        self._wrapper, self._adapters, self._activate = wrapper, adapters, activate

    def __enter__(self) -> None:
        wrapper, name = self._wrapper, self._wrapper.parameter_name
        self._layer = layer = wrapper.get_base_layer()
        holder = nn.Module()
        holder.register_parameter(
            name, nn.Parameter(adapted(wrapper).detach(), requires_grad=False)
        )
        wrapper.__dict__["get_base_layer"] = lambda: holder
        try:
            self._inner = self._activate(wrapper, self._adapters)
            self._inner.__enter__()
            layer.__dict__[name] = getattr(holder, name)
        finally:
            del wrapper.__dict__["get_base_layer"]
        self._holder = holder

    def __exit__(self, *error: Any) -> None:
        del self._layer.__dict__[self._wrapper.parameter_name]
        self._wrapper.__dict__["get_base_layer"] = lambda: self._holder
        try:
            self._inner.__exit__(*error)
        finally:
            del self._wrapper.__dict__["get_base_layer"]
