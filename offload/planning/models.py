"""Several models that share one engine, and the modules of a model that are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

from torch import nn


class Models(nn.Module):
    """Models by name.  Each of them is called on its own."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not `add_module`, which refuses names of methods, such as "train".
        self._modules.update(models)

    def reorder(self, names: Iterable[str]) -> None:
        """Reorder the models."""
        self._modules = {name: self._modules[name] for name in names}

    def forward(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raise ``TypeError``."""
        raise TypeError(f"call one of the models: {', '.join(named_models(self))}")


def named_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the models by name, if there are several."""
    return dict(model.named_children()) if isinstance(model, Models) else {}


def entries(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are called from outside, by the name that they have in ``model``.

    That is the model itself, under the name ``""``.  ``Models``, and containers that cannot be
    called (``nn.ModuleDict``, ``nn.ModuleList``), have those inside them instead.
    """
    found: dict[str, nn.Module] = {}
    for name, module in _entries("", model):
        if all(module is not other for other in found.values()):
            found[name] = module
    return found


def _entries(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    called = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    inside = list(module.named_children())
    if isinstance(module, Models) or (inside and not called):
        for child_name, child in inside:
            yield from _entries(f"{name}.{child_name}" if name else child_name, child)
    else:
        yield name, module


def reorder(model: nn.Module, names: Iterable[str]) -> None:
    """Reorder several models to match ``names``, if these are their names."""
    order = list(names)
    if isinstance(model, Models) and set(order) == set(named_models(model)):
        model.reorder(order)


def by_model(model: nn.Module) -> dict[str, nn.Module]:
    """Return the models, by the prefix of the names of their tensors.

    That is ``""`` for a single model.
    """
    several = named_models(model)
    return {f"{name}.": each for name, each in several.items()} if several else {"": model}
