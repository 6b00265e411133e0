"""Codes that layers of GPTQ and AWQ keep in buffers, as parameters while a model is wrapped.

An engine moves parameters.  Such a layer reads its buffers as attributes, so it does not notice.
The names in state dicts are the same.  Scales and zero points stay buffers, as they are small, and
some layers assign to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from . import bitsandbytes_private

CODES = "qweight"
_PROMOTED = "_overspill_promoted"  # attribute of a layer whose codes are a parameter now


def promote(model: nn.Module, done: list[nn.Module]) -> None:
    """Make the codes of layers frozen parameters; layers of an engine are left alone.

    Args:
        done: receives each layer before it is changed, for ``demote``.
    """
    made: dict[int, nn.Parameter] = {}  # layers may share their codes
    for module in model.modules():
        codes = module._buffers.get(CODES)
        kept = CODES not in module._non_persistent_buffers_set
        if codes is None or codes.is_floating_point() or not kept or _PROMOTED in vars(module):
            continue
        done.append(module)
        module.__dict__[_PROMOTED] = True
        if id(codes) not in made:
            made[id(codes)] = nn.Parameter(codes, requires_grad=False)
        module._parameters[CODES] = made[id(codes)]
        del module._buffers[CODES]


def demote(layers: Sequence[nn.Module]) -> None:
    """Make the codes of layers buffers again; it can be repeated after an exception."""
    made: dict[int, torch.Tensor] = {}
    for module in layers:
        p = module._parameters.get(CODES)
        if p is not None:
            module._buffers[CODES] = made.setdefault(id(p), p.data)
            del module._parameters[CODES]
        module.__dict__.pop(_PROMOTED, None)


def give_back(model: nn.Module) -> None:
    """Make all quantised layers what they were before ``wrap``; weights are in memory again."""
    bitsandbytes_private.give_back(model)
    demote([module for module in model.modules() if _PROMOTED in vars(module)])
