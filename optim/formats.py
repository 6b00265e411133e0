"""Storage of weights, masters and moments: names, dtypes, and the exact split of a master.

A low-precision weight may have an fp32 master in one of two ways.  ``"split"`` stores the master's
upper half as the bf16 weight itself and its lower half separately: 4 bytes instead of 6, without
loss.  ``"fp32"`` stores the master whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Master = Literal["split", "fp32"] | None
Moments = Literal["fp32", "bf16", "int8"]

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}
BLOCK = 256
"""Elements that share one scale of an int8 moment."""
GRANULES = {torch.float32: 1, torch.bfloat16: 32, torch.uint8: BLOCK}
"""Where a buffer may be cut, by the dtype of its moments: at multiples of so many elements.  int8
moments share scales; bf16 ones take their noise by the widest step of a kernel."""

UNSIGNED_MOMENTS: set[str] = set()
"""Moments that are never below zero, by name: ``register`` adds those of a rule."""

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000


@dataclass(frozen=True)
class Field:
    """One value that the optimizer keeps per ``block`` elements: its name and storage dtype."""

    name: str
    dtype: torch.dtype
    block: int = 1

    def elements(self, numel: int) -> int:
        """Stored elements for ``numel`` parameters."""
        return -(-numel // self.block)


@dataclass(frozen=True)
class WholeField(Field):
    """One value of a parameter as a whole, in a shape of its own: see ``Rule.whole``."""

    block: int = 0
    shape: tuple[int, ...] = ()

    def elements(self, numel: int) -> int:
        """Stored elements; ``numel`` does not matter."""
        return math.prod(self.shape)


class Stored(Protocol):
    """Anything that is stored in some dtype."""

    @property
    def dtype(self) -> torch.dtype: ...


def granule_of(fields: Iterable[Stored]) -> int:
    """Where a buffer with this state may be cut: at multiples of so many elements."""
    return max((GRANULES.get(field.dtype, 1) for field in fields), default=1)


def master_fields(weight_dtype: torch.dtype, master: Master) -> tuple[Field, ...]:
    """What a master adds to the state.

    Raises:
        ValueError: ``master`` does not fit ``weight_dtype``.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weights of {weight_dtype} have no kernel; use one of {WEIGHT_DTYPES}")
    if master is None:
        return ()
    if master == "split" and weight_dtype is torch.bfloat16:
        return (Field("master_lo", torch.int16),)
    if master == "fp32" and weight_dtype is not torch.float32:
        return (Field("master", torch.float32),)
    raise ValueError(
        f"master={master!r} does not fit weights of {weight_dtype}: bfloat16 takes 'split', "
        "'fp32' or None, float16 takes 'fp32' or None, float32 is its own master (None)"
    )


def moment_fields(name: str, moments: Moments) -> tuple[Field, ...]:
    """The stored form of one moment: itself, and for int8 a scale per ``BLOCK`` elements."""
    if moments not in MOMENT_DTYPES:
        raise ValueError(f"moments={moments!r} is unknown; use one of {sorted(MOMENT_DTYPES)}")
    field = Field(name, MOMENT_DTYPES[moments])
    if moments == "int8":
        return (field, Field(scale_name(name), torch.float32, BLOCK))
    return (field,)


def scale_name(moment: str) -> str:
    """The name of the field that holds an int8 moment's scales."""
    return f"{moment}_scale"


def as_weight(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an fp32 value in the dtype of a weight, bf16 rounded as by ``round_to_upper``."""
    return round_to_upper(value) if dtype == torch.bfloat16 else value.to(dtype)


def round_to_upper(value: Tensor) -> Tensor:
    """fp32 to bf16, to nearest, ties away from zero: the rule of every weight that has a master.

    NaN stays a (quiet) NaN.  Of the usual tie rules only this one can be undone from 16 bits.
    """
    raw = value.view(torch.int32)
    upper = raw.add(0x8000).bitwise_right_shift_(16).to(torch.int16)
    nan = value.isnan()
    if nan.any():
        upper = torch.where(nan, ((raw >> 16) | 0x40).to(torch.int16), upper)
    return upper.view(torch.bfloat16)


def split_master(value: Tensor) -> tuple[Tensor, Tensor]:
    """Splits fp32 into its bf16 upper half and its lower 16 bits (int16 storage), losing nothing.

    ``join_master`` gives every finite and infinite value back bit for bit; NaN comes back as NaN.
    """
    return round_to_upper(value), value.view(torch.int32).to(torch.int16)


def join_master(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 master from its bf16 upper half and its lower 16 bits.

    Lower bits of 0x8000 or more had rounded the upper half up by one; as a negative int16 they
    take it back.
    """
    high = upper.view(torch.int16).to(torch.int32)
    return ((high << 16) + lower.to(torch.int32)).view(torch.float32)


def join_halves(upper: NDArray[np.uint16], lower: NDArray[np.uint16]) -> NDArray[np.float32]:
    """As ``join_master``, of the raw halves, by one thread: for work beside transfers."""
    whole = np.empty(upper.size, np.uint32)
    halves = whole.view(np.uint16).reshape(-1, 2)
    halves[:, 0] = lower
    np.subtract(upper, lower >> 15, out=halves[:, 1])
    return whole.view(np.float32)
