"""Tensors over a slot: descriptions to rebuild them over another copy, and the views of a unit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..private import torch_private
from ..schedule.units import Unit


class View(NamedTuple):
    """The description of a tensor over a unit's slot.

    ``offset`` counts elements of ``dtype`` from the slot's start. ``conjugated`` and ``negated``
    are torch's lazy bits: memory holds the value without them.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False

    @classmethod
    def of(cls, t: torch.Tensor) -> View:
        """Describe a tensor, to rebuild it over another copy of its memory."""
        shape, stride = tuple(t.shape), tuple(t.stride())
        return cls(int(t.storage_offset()), t.dtype, shape, stride, t.is_conj(), t.is_neg())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Rebuild the tensor over ``storage``."""
        made = view_in(storage, 0, self.dtype, self.offset, self.shape, self.stride)
        if self.conjugated:
            made = made.conj()
        return torch_private.negated(made) if self.negated else made


def view_in(
    storage: torch.UntypedStorage, byte_offset: int, dtype: torch.dtype,
    offset: int, shape: Sequence[int], stride: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Return a tensor over part of a storage; ``offset`` counts elements after ``byte_offset``."""
    start = byte_offset // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, shape, stride)


def make_views(unit: Unit, storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    """Return views of all parameters of a unit over its slot."""
    return tuple(
        view_in(storage, chunk.byte_offset, *spec.as_parameter(chunk.dtype))
        for chunk, spec in unit.params
    )


@dataclass(frozen=True)
class OnloadedUnit:
    """One residency of one unit: the storage over its slot, and its parameters' views.

    Attributes:
        streams: compute streams that have used it; modules may have several.
        waited: the streams that have waited for the copy that brought its weights.
        lasting: cached tensors over the slot of a resident unit, for backward.
    """

    unit: int
    storage: torch.UntypedStorage
    views: tuple[torch.Tensor, ...]  # in the order of ``unit.params``
    streams: set[Hashable] = field(default_factory=set)
    waited: set[Hashable] = field(default_factory=set)
    lasting: dict[View, torch.Tensor] = field(default_factory=dict)
