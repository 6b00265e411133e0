"""Checks of the model and optimizer arguments of public functions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .engine import engine_of
from .engine_handle import EngineHandle
from .optim.joint import JointOptimizer
from .planning.models import Models, named_models


def as_model(model: object) -> nn.Module:
    """Return a model; for a dict of models, the module that has them all.

    Raises:
        TypeError: it is neither.
        ValueError: the dict is empty, has a name with a dot or a slash, or a model twice.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping):
        return _together(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got the class {model.__name__}; call it")
    if isinstance(model, torch.optim.Optimizer):
        raise TypeError(
            f"model must be a torch.nn.Module, got the optimizer {type(model).__name__}; the model "
            "comes first: wrap(model, optimizer)"
        )
    hint = ""
    if isinstance(model, (tuple, list)):
        hint = "; to wrap several models, pass a dict: wrap({'a': a, 'b': b}, optimizer)"
    raise TypeError(f"model must be a torch.nn.Module, got {_kind_of(model)}{hint}")


def _together(models: Mapping[object, object]) -> nn.Module:
    """Return the module that has these models: the existing one if they are wrapped together."""
    if not models:
        raise ValueError("the dict of models is empty; pass at least one model")
    found: dict[str, nn.Module] = {}
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got a dict in which {name!r} is "
                f"{_kind_of(model)}; give modules by name"
            )
        if not isinstance(name, str) or not name or set(name) & set("./\\\0"):
            raise ValueError(
                f"names of models must be strings without dots and slashes, got {name!r}"
            )
        if (other := next((n for n, m in found.items() if m is model), None)) is not None:
            raise ValueError(f"models {other!r} and {name!r} are the same module; give it once")
        found[name] = model
    engine = next(filter(None, map(engine_of, found.values())), None)
    if engine is not None and named_models(engine.model) == found:
        return engine.model
    return Models(found)


def require_optimizer(optimizer: object) -> None:
    """Check that ``optimizer`` is a torch optimizer that is not wrapped.

    Raises:
        TypeError: it is not.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, EngineHandle):
        return
    hint = "build one over model.parameters()"
    if isinstance(optimizer, EngineHandle):
        hint = (
            "wrap returned it, so it is wrapped already; build a new torch optimizer over the "
            "parameters of this model"
        )
    elif isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        hint = "pass scheduler.optimizer"
    elif isinstance(optimizer, type):
        hint = f"create an instance: {optimizer.__name__}(model.parameters(), ...)"
    raise TypeError(
        f"optimizer must be a torch.optim.Optimizer or a list of them, got {_kind_of(optimizer)}; "
        f"{hint}"
    )


def as_one(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer, or one that has the groups of all in a list.

    Raises:
        TypeError: it is neither, or wrapped already.
        ValueError: the list is empty, or a parameter is in two optimizers.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in given:
        require_optimizer(each)
    if isinstance(optimizer, (list, tuple)):
        return JointOptimizer(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _kind_of(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
