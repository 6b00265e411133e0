"""Models that ``DistributedDataParallel`` replicates, as a ``ParallelStrategy``.

Every rank has all weights and gradients, and the state of some rows of each parameter (ZeRO-1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import OffloadConfig
from ..errors import ModelError
from ..planning.regions import TensorRegion
from ..planning.unit_discovery import ROOT, FoundUnit, find_units, unit_parameters
from ..private import torch_private
from .parts import WholeParam, rows_in, rows_of_rank


class Replica:
    """One parameter, whole on every rank; see ``LocalShard``.

    Attributes:
        whole: its own memory, with all rows.
    """

    def __init__(self, name: str, p: nn.Parameter, rank: int, size: int) -> None:
        self.name, self._p, self._rank, self._size = name, p, rank, size
        self.whole: torch.Tensor = torch.Tensor.data.__get__(p)  # type: ignore[attr-defined]

    @property
    def param(self) -> nn.Parameter:
        return self._p

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, a view of the whole parameter's memory."""
        return self.of_rank(self.whole, self._rank)

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the range of a rank's rows; a scalar is one row."""
        return rows_of_rank(rows_in(self.whole), rank, self._size)

    @property
    def region(self) -> TensorRegion:
        shape = tuple(self._p.shape)
        if not shape:
            return TensorRegion.all_of(shape)
        first, last = self.rows(self._rank)
        return TensorRegion((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), shape)

    @property
    def ranks(self) -> int:
        return self._size

    def part_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != self._p.shape:
            return value
        return self.of_rank(value, self._rank)

    def of_rank(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's rows of a tensor of the parameter's shape."""
        first, last = self.rows(rank)
        if not whole.dim():
            return whole if last > first else whole.unsqueeze(0)[:0]
        return whole[first:last]


class ReplicatedModule:
    """A unit of the model; see ``SpreadModule``."""

    def __init__(self, runs: FoundUnit, shards: list[Replica]) -> None:
        self.name = "" if runs.name == ROOT else runs.name
        self.runs, self.module, self.shards = runs, runs.module, shards


class Replicated:
    """The model inside ``DistributedDataParallel``. See ``ParallelStrategy``.

    Trained weights stay on the device, where DDP's reducer needs their gradients. So do frozen
    ones, of which each rank commits its rows, unless ``offload_frozen`` is called.
    """

    ranks = tensor_ranks = 1  # every rank computes with its own weights

    def __init__(self, ddp: DistributedDataParallel, *, filled: bool) -> None:
        """
        Args:
            filled: frozen weights come from elsewhere, so they may be on ``meta``.

        Raises:
            OffloadError: the model cannot be wrapped.
        """
        inner: nn.Module = ddp.module
        if ddp.is_multi_device_module:
            raise ModelError("DistributedDataParallel over several devices of a rank is refused")
        self.ddp, self.model, self.held = ddp, inner, (ddp,)
        rank, size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
        names = {id(p): name for name, p in inner.named_parameters()}
        self.parts = [
            ReplicatedModule(found, [
                Replica(names.pop(id(p)), p, rank, size)
                for _, p in unit_parameters(found) if id(p) in names
            ])
            for found in find_units(inner)
        ]  # fmt: skip
        self.hooked: dict[str, list[WholeParam]] = {}
        _refuse(inner, filled=filled)

    def offload_frozen(self) -> None:
        """See ``ParallelStrategy``."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for part in self.parts:
            part.shards = [each for each in part.shards if each.param.requires_grad]
            read = dict.fromkeys(p for _, p in unit_parameters(part.runs) if not p.requires_grad)
            self.hooked[part.name] = [WholeParam(names[id(p)], p) for p in read]

    def refuse(self, config: OffloadConfig) -> None:
        if config.precision is not None:
            raise ValueError(
                "precision= is not supported under DistributedDataParallel, which has reserved "
                "memory for gradients of the model's dtype; convert the model before creating DDP, "
                "or shard it with fully_shard"
            )
        if config.resident is not None and not self.hooked:
            raise ValueError(
                "resident= has no effect under DistributedDataParallel without frozen= or "
                "weights=, since all weights stay on the device; leave it out"
            )
        if config.update == "backward":
            raise ValueError(
                "update='backward' is not for DistributedDataParallel: its gradients are final "
                "only when backward is over; use update='next_forward'"
            )

    def cast(self, dtype: torch.dtype | None) -> None:
        """Do nothing: ``refuse`` refuses another dtype."""

    def begin(self) -> None:
        """Do nothing: the strategy changes nothing."""

    def give_back(self) -> None:
        """Do nothing: the strategy changes nothing."""


def _on_meta(name: str) -> ModelError:
    return ModelError(
        f"{name!r} is on meta, and DistributedDataParallel needs its values; build the model with "
        "memory, or, if this is a frozen parameter that DDP ignores, pass weights= to wrap "
        "(safetensors, or a Hugging Face folder)"
    )


def _refuse(model: nn.Module, *, filled: bool) -> None:
    for name, p in model.named_parameters():
        if p.is_meta and (p.requires_grad or not filled):
            raise _on_meta(name)
        if torch_private.is_wrapper(p):
            raise ModelError(f"parameter {name!r} is a {type(p).__name__}, which is not supported")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise _on_meta(name)
