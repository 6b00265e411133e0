"""What a rank has of a model that is spread over several, however that is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..config import OffloadConfig
from ..errors import OffloadError


class LocalShard(Protocol):
    """One parameter, of which this rank has rows: those that are one after the other in its first
    dimension, as many as on the other ranks, but for the last ones."""

    @property
    def name(self) -> str:
        """In the model."""
        ...

    @property
    def param(self) -> nn.Parameter:
        """The parameter that users see."""
        ...

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, maybe none."""
        ...

    def first_row(self, rank: int) -> int:
        """Where a rank's rows begin in the whole parameter."""
        ...

    def part_of(self, value: Any) -> Any:
        """Of what is as the whole parameter is, this rank's rows; all else as it is."""
        ...


class SpreadModule(Protocol):
    """A module whose parameters are brought to compute together."""

    @property
    def name(self) -> str:
        """Of the module, in the model."""
        ...

    @property
    def module(self) -> nn.Module:
        """Whose parameters they are."""
        ...

    @property
    def shards(self) -> Sequence[LocalShard]:
        """Its parameters, each in one part of the model alone."""
        ...


class ParallelStrategy(Protocol):
    """How a model is spread.

    Attributes:
        model: whose names parameters have in stores.
        held: the modules that users have.
        parts: of ``model``, all of them.
    """

    model: nn.Module
    held: Sequence[nn.Module]
    parts: Sequence[SpreadModule]

    def refuse(self, config: OffloadConfig) -> None:
        """
        Raises:
            ValueError: an option is not for it.
        """
        ...


def rows_in(tensor: torch.Tensor) -> int:
    """A single number is one row."""
    return tensor.shape[0] if tensor.dim() else 1


def rows_of_rank(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The first of a rank's rows, and the first that is not: as ``torch.chunk`` cuts."""
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def require_initialised() -> None:
    """
    Raises:
        OffloadError: torch.distributed is not in use.
    """
    if not dist.is_initialized():
        raise OffloadError(
            "the model is spread over ranks, but torch.distributed is not initialised"
        )
