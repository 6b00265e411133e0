"""Rectangular parts of tensors: what a rank has of a parameter that is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Place = tuple[tuple[int, ...], tuple[int, ...]]  # where a region begins, and the whole shape


@dataclass(frozen=True, order=True)
class TensorRegion:
    """A rectangular part of a tensor.

    Attributes:
        first: where it begins, by dimension.
        shape: its own shape.
        whole: the shape of the whole tensor.
    """

    first: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> TensorRegion:
        """Return the region that is the whole tensor."""
        return cls((0,) * len(shape), tuple(shape), tuple(shape))

    @property
    def place(self) -> Place:
        """What describes it besides its own shape."""
        return self.first, self.whole

    @property
    def is_rows(self) -> bool:
        """Whether it consists of whole rows."""
        return self.shape[1:] == self.whole[1:]

    @property
    def rows(self) -> TensorRegion:
        """The whole rows that contain it."""
        first, shape = (*self.first[:1], *(0 for _ in self.first[1:])), self.shape[:1]
        return TensorRegion(first, (*shape, *self.whole[1:]), self.whole)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part, a view, of a tensor of the whole shape."""
        return self.inside(tensor, TensorRegion.all_of(self.whole))

    def inside(self, tensor: torch.Tensor, other: TensorRegion) -> torch.Tensor:
        """Return this part of a ``tensor`` that is the part ``other``, which contains this one."""
        begins = zip(self.first, other.first, self.shape, strict=True)
        return tensor[tuple(slice(mine - its, mine - its + n) for mine, its, n in begins)]

    def shared_with(self, other: TensorRegion) -> TensorRegion | None:
        """Return the part that both have; ``None``: they have nothing in common."""
        ends = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.first, self.shape, other.first, other.shape, strict=True)
        ]
        if any(last <= first for first, last in ends):
            return None
        shape = tuple(last - first for first, last in ends)
        return TensorRegion(tuple(first for first, _ in ends), shape, self.whole)
