"""Whole parameters on any device: their elements as a flat view, and their exact fp32 weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .norm import sum_of_squares
from .reference import read_weight, write_weight

MASTERS = ("master", "master_lo")


def flat(tensor: Tensor) -> Tensor:
    """A flat view of a tensor in the order of its memory.

    Raises:
        ValueError: its elements do not lie side by side.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    permuted = tensor.permute(order)
    if not permuted.is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or "
            "overlaps in memory; make it contiguous first"
        )
    return permuted.view(-1)


def masters_in(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fields of a state that belong to the weight."""
    return {name: state[name] for name in MASTERS if name in state}


def exact_weight(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the weight in fp32: its ``master``, or the weight if it is fp32, else a copy.

    Args:
        state: may have ``master`` (fp32) or ``master_lo`` (see ``formats``).
    """
    masters = masters_in(state)
    if "master" in masters:
        return masters["master"]
    if masters or weight.dtype != torch.float32:
        return read_weight(weight, masters)
    return weight


def store_exact(exact: Tensor, weight: Tensor, state: Mapping[str, Tensor]) -> bool:
    """Write an fp32 value to a weight and its master; return whether the weight is finite."""
    masters = masters_in(state)
    if masters or weight.dtype != torch.float32:
        write_weight(exact, weight, masters)
    elif exact.data_ptr() != weight.data_ptr():
        weight.copy_(exact)
    if weight.device.type != "cpu":
        return bool(torch.isfinite(weight).all())
    return math.isfinite(sum_of_squares(flat(weight)))  # one pass, without a temporary
