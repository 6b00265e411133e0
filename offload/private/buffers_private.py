"""Codes that layers of GPTQ and AWQ keep in buffers, as parameters while a model is wrapped.

An engine moves parameters.  Such a layer reads its buffers as attributes, so it does not notice.
The names in state dicts are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import bitsandbytes_private

CODES = ("qweight",)  # names of buffers that hold the codes of a weight
_PROMOTED = "_overspill_promoted"


def promote(model: nn.Module) -> None:
    """Make the buffers of layers with quantised codes frozen parameters; ``demote`` undoes it."""
    for module in model.modules():
        if not any(_holds_codes(module._buffers.get(name)) for name in CODES):
            continue
        names = [
            name for name, value in module._buffers.items()
            if value is not None and name not in module._non_persistent_buffers_set
        ]  # fmt: skip
        promoted: list[str] = module.__dict__.setdefault(_PROMOTED, [])
        for name in names:
            promoted.append(name)
            value: Any = module._buffers.pop(name)
            module._parameters[name] = nn.Parameter(value, requires_grad=False)


def _holds_codes(value: torch.Tensor | None) -> bool:
    return value is not None and not value.is_floating_point()


def demote(model: nn.Module) -> None:
    """Make buffers of what ``promote`` made parameters; a second call does nothing."""
    for module in model.modules():
        for name in module.__dict__.pop(_PROMOTED, ()):
            p = module._parameters.pop(name, None)
            if p is not None:
                module._buffers[name] = p.data


def give_back(model: nn.Module) -> None:
    """Make all quantised layers what they were before ``wrap``; weights are in memory again."""
    bitsandbytes_private.give_back(model)
    demote(model)


def keeps_dtype(model: nn.Module) -> frozenset[int]:
    """Return the ids of parameters that ``precision=`` does not convert: codes and their scales."""
    return frozenset(
        id(module._parameters[name])
        for module in model.modules()
        for name in module.__dict__.get(_PROMOTED, ())
    )
