"""Models and optimizers that cannot be wrapped, told before anything is planned."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from .config import OffloadConfig
from .engine import engine_of
from .errors import OffloadError
from .movement.accelerators.choose import Accelerator
from .optim.optimizer import moments_of
from .training import torch_private
from .training.managed import managed


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    engine = engine_of(model)
    if engine is not None and engine.finished:
        raise OffloadError(
            "the model was wrapped, and its engine is closed, with the weights; build the model "
            "again (overspill.unwrap(model) before close() keeps them)"
        )
    if engine is not None:
        raise OffloadError("the model is wrapped already; overspill.unwrap(model) it first")
    check_modules(model)
    for name, p in model.named_parameters():
        _check_parameter(name, p)
    _refuse_overlaps(model)
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in own:
                raise ValueError(
                    f"param group {number} holds a parameter of shape {tuple(p.shape)} that is "
                    "not in the model; build the optimizer from model.parameters()"
                )


def check_modules(model: nn.Module) -> None:
    """
    Raises:
        OffloadError: a module is wrapped already, or is of a kind that is not supported.
    """
    for name, module in model.named_modules():
        if engine_of(module) is not None:
            raise OffloadError(f"module {name!r} is wrapped already; unwrap it first")
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise OffloadError(f"{kind} is not supported: overspill trains on one device")
        if getattr(module, "max_norm", None) is not None:
            raise OffloadError(
                f"module {name!r} changes its weight in forward (max_norm), which would be lost; "
                "set max_norm=None, and renormalise between step() and the next forward"
            )


def _check_parameter(name: str, p: nn.Parameter) -> None:
    if managed(p) is not None:
        raise OffloadError(
            f"parameter {name!r} belongs to another wrapped model; unwrap that one first"
        )
    if torch_private.is_wrapper(p):
        kinds = f"{type(p).__name__} of {type(p.data).__name__}"
        raise OffloadError(
            f"parameter {name!r} is no plain tensor ({kinds}): models that are sharded (FSDP2, "
            "DTensor) or quantised are not supported; wrap the plain model, on one device"
        )


def _refuse_overlaps(model: nn.Module) -> None:
    """Raises if two parameters lie over the same memory: they would be parted without a word."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in model.named_parameters():
        if p.is_meta or not p.numel():
            continue
        start = int(p.storage_offset()) * p.element_size()
        last = sum((n - 1) * int(step) for n, step in zip(p.shape, p.stride(), strict=True))
        span = (start, start + (last + 1) * p.element_size(), name)
        spans.setdefault(torch_private.storage_key(p), []).append(span)
    for found in spans.values():
        found.sort()
        for (_, end, one), (start, _, other) in pairwise(found):
            if start < end:
                raise OffloadError(
                    f"parameters {one!r} and {other!r} lie over the same memory (tied by .data); "
                    "tie them as one parameter: module.weight = other.weight"
                )


def check_devices(model: nn.Module, accelerator: Accelerator) -> None:
    device = accelerator.device
    allowed = {"cpu", "meta", device.type}
    there = "" if device.type == "cpu" else f" or to {device}"
    for name, p in model.named_parameters():
        if p.device.type not in allowed:
            raise ValueError(
                f"parameter {name!r} is on {p.device}; move the model to the CPU{there} before wrap"
            )


def check_moments(optimizer: torch.optim.Optimizer, config: OffloadConfig) -> None:
    own = moments_of(optimizer)
    if own not in ("fp32", config.moments):
        raise ValueError(
            f"the optimizer stores its moments as {own!r}, but wrap was told {config.moments!r}; "
            f"pass moments={own!r} to wrap, or leave it out of the optimizer"
        )
