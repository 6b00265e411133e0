"""Attributes that ``wrap`` sets on modules: the engine, and methods that refuse copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .errors import LifecycleError
from .params.pickling import copied, reduced, spawning
from .planning.models import entries, named_models

ENGINE, MADE = "_overspill_engine", "_overspill_optimizer"
COPY, PICKLE = "__deepcopy__", "__reduce_ex__"


def marked_modules(model: nn.Module) -> list[nn.Module]:
    """Return a model and the modules in it that users call or pass to our functions."""
    inside = (*named_models(model).values(), *entries(model).values())
    return list(dict.fromkeys((model, *inside)))


def hold(model: nn.Module, made: object) -> None:
    """Store what ``wrap`` returns in the modules of a model that users call."""
    for module in marked_modules(model):
        module.__dict__[MADE] = made


class ModelMarks:
    """Attributes of the modules that users call, until ``remove``.

    As instance attributes, the methods refuse to copy or pickle a module before anything is copied.
    The engine stays alive as long as one of these modules.
    """

    def __init__(self, model: nn.Module, ordinary: Callable[[], bool]) -> None:
        """
        Args:
            ordinary: returns whether the parameters are ordinary ones now.
        """
        self._modules, self._ordinary = marked_modules(model), ordinary

    def put(self, engine: object | None) -> None:
        """Set the attributes; with an ``engine`` if these modules are its own."""
        found = {} if engine is None else {ENGINE: engine}
        for module in self._modules:
            methods = {COPY: partial(self._copied, module), PICKLE: partial(self._reduced, module)}
            module.__dict__.update({**found, **methods})

    def remove(self) -> None:
        """Remove the attributes."""
        for module in self._modules:
            for name in (ENGINE, MADE, COPY, PICKLE):
                module.__dict__.pop(name, None)

    def _copied(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if self._ordinary():
            return copied(module, memo, ENGINE, MADE, COPY)
        raise LifecycleError(
            "a wrapped model cannot be copied: its weights are not all in memory. Copy it before "
            "wrap, or inside `with overspill.materialized(model):`; for an average of the weights "
            "use overspill.ema(optimizer, decay) before wrap"
        )

    def _reduced(self, module: nn.Module, _protocol: object) -> Any:
        # A spawned data-loader worker pickles the model if its collator holds it.
        if spawning() or self._ordinary():
            return reduced(module, ENGINE, MADE, COPY)
        raise LifecycleError(
            "a wrapped model cannot be pickled: its weights are not all in memory. Save "
            "model.state_dict(), or optimizer.save(path) (with a durable store), or pickle it "
            "inside `with overspill.materialized(model):`"
        )
