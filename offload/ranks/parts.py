"""The interface of models that are spread over ranks, for every parallel strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..config import OffloadConfig
from ..errors import RankError
from ..planning.regions import TensorRegion
from ..planning.unit_discovery import FoundUnit


class LocalShard(Protocol):
    """One parameter of which this rank has a region."""

    @property
    def name(self) -> str:
        """The name in the model."""
        ...

    @property
    def param(self) -> nn.Parameter:
        """The parameter that users see."""
        ...

    @property
    def local(self) -> torch.Tensor:
        """This rank's region, possibly without elements."""
        ...

    @property
    def region(self) -> TensorRegion:
        """Where ``local`` is in the whole parameter."""
        ...

    @property
    def ranks(self) -> int:
        """The number of ranks among which the parameter is divided."""
        ...

    def part_of(self, value: Any) -> Any:
        """Return this rank's region of a value that is shaped like the whole parameter.

        Other values are returned unchanged.
        """
        ...


class WholeParam:
    """A parameter that every rank has whole, in the engine itself. See ``LocalShard``."""

    ranks = 1

    def __init__(self, name: str, p: nn.Parameter) -> None:
        self.name, self.param, self.region = name, p, TensorRegion.all_of(tuple(p.shape))

    @property
    def local(self) -> torch.Tensor:
        return self.param.detach()

    def part_of(self, value: Any) -> Any:
        return value


class SpreadModule(Protocol):
    """A module whose parameters are brought to compute together."""

    @property
    def name(self) -> str:
        """The name of the module in the model."""
        ...

    @property
    def module(self) -> nn.Module:
        """The module that owns the parameters."""
        ...

    @property
    def shards(self) -> Sequence[LocalShard]:
        """Its parameters. Each belongs to one part of the model only."""
        ...

    @property
    def runs(self) -> FoundUnit:
        """The unit of the model that computes with these parameters."""
        ...


class ParallelStrategy(Protocol):
    """The way in which a model is spread over ranks.

    Attributes:
        model: the model whose parameter names are used in stores.
        held: the modules that users hold.
        parts: all parts of ``model``.
        hooked: by name of a part, further parameters that it reads. The engine's hooks bring them
            to compute, as on one device.
        ranks: see ``StandInModel``.
        tensor_ranks: see ``StandInModel``.
    """

    model: nn.Module
    held: Sequence[nn.Module]
    parts: Sequence[SpreadModule]
    hooked: Mapping[str, Sequence[WholeParam]]

    @property
    def ranks(self) -> int: ...

    @property
    def tensor_ranks(self) -> int: ...

    def offload_frozen(self) -> None:
        """Let frozen weights leave the device, if the strategy keeps them there."""
        ...

    def refuse(self, config: OffloadConfig) -> None:
        """Refuse options that the strategy does not support.

        Raises:
            ValueError: an option is not supported.
        """
        ...

    def cast(self, dtype: torch.dtype | None) -> None:
        """Change the dtype of all floating-point shards, whose values an engine converts.

        ``None``: nothing is changed.
        """
        ...

    def begin(self) -> None:
        """Drop what ``give_back`` would restore: every rank has an engine."""
        ...

    def give_back(self) -> None:
        """Restore what the strategy changed in the model."""
        ...


def rows_in(tensor: torch.Tensor) -> int:
    """Return the number of rows; a scalar is one row."""
    return tensor.shape[0] if tensor.dim() else 1


def rows_of_rank(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of a rank's rows, [first, last), split as ``torch.chunk`` does."""
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def require_initialised() -> None:
    """Require an initialised ``torch.distributed``.

    Raises:
        OffloadError: it is not initialised.
    """
    if not dist.is_initialized():
        raise RankError("the model is spread over ranks, but torch.distributed is not initialised")
