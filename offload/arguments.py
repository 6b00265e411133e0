"""Checks of the model and optimizer arguments of public functions."""

from __future__ import annotations

import torch
from torch import nn

from .engine_handle import EngineHandle
from .optim.joint import JointOptimizer


def require_model(model: object) -> None:
    """Check that ``model`` is a module.

    Raises:
        TypeError: it is not.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got the class {model.__name__}; call it")
    if isinstance(model, torch.optim.Optimizer):
        raise TypeError(
            f"model must be a torch.nn.Module, got the optimizer {type(model).__name__}; the model "
            "comes first: wrap(model, optimizer)"
        )
    hint = ""
    if isinstance(model, (tuple, list, dict)):
        container = "ModuleDict" if isinstance(model, dict) else "ModuleList"
        hint = (
            f"; to wrap several modules, put them in a torch.nn.{container} and wrap it, with one "
            "optimizer over its parameters"
        )
    raise TypeError(f"model must be a torch.nn.Module, got {_kind_of(model)}{hint}")


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
