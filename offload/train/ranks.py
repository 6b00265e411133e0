"""The ranks that a job runs on: as started by torchrun, else one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..planning.partition import partition
from ..planning.unit_discovery import units_to_shard
from ..private import torch_private
from ..ranks.filling import leave_on_meta, memory_of
from ..ranks.fsdp_private import sharded_modules
from ..ranks.parts import rows_of_rank
from ..state.importing import Others, open_weights
from ..state.initial import default_init, initialise
from ..state.weight_files import match_files

PATIENCE = timedelta(minutes=15)  # for a rank that does not answer


@dataclass(frozen=True)
class Ranks:
    """One process of ``size`` that train together; ``local``: its number on its machine."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this one writes what one has to write."""
        return self.rank == 0

    def device(self, asked: str | None) -> str | None:
        """This rank's, where ``asked`` names none of several."""
        accelerator = torch.accelerator.current_accelerator()
        kind = asked or (None if accelerator is None else accelerator.type)
        if not self.several or kind in (None, "cpu", "sim") or ":" in str(kind):
            return asked
        return f"{kind}:{self.local}"

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Of all ranks' values; each of them asks."""
        if self.several:
            dist.all_reduce(value)
            value /= self.size
        return value


ALONE = Ranks()


@contextmanager
def joined(device: str | None) -> Iterator[Ranks]:
    """Joins the ranks that torchrun has started; alone without it.

    Raises:
        ValueError: torchrun's variables make no sense.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    ranks = Ranks(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))
    mine = ranks.device(device)
    if mine is not None and ":" in mine:
        torch.accelerator.set_device_index(torch.device(mine).index)
    dist.init_process_group(timeout=PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module, ranks: Ranks, device: str | None, *, filled: bool) -> nn.Module:
    """A model on ``meta``, sharded by FSDP2, block by block.

    ``filled``: its weights come from elsewhere.  Else it is initialised unit by unit, as ``wrap``
    does it on one rank, from the same random numbers; a rank keeps its rows.
    """
    blocks = [found.module for found in units_to_shard(model)]
    values = {} if filled else _initial(model, ranks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    if not filled:
        parts = sharded_modules(model)
        for shard in (shard for each in parts for shard in each.shards):
            shard.put(values[shard.name], memory_of(device))
        leave_on_meta(model, parts, device)
    return model


def replicated(model: nn.Module, device: str | None, weights: Path | None) -> nn.Module:
    """A model on ``meta``, with the weights of a folder or its first ones, inside of DDP."""
    there = memory_of(device)
    values = _initial(model, Ranks()) if weights is None else _of_files(model, weights)
    for name, p in model.named_parameters():
        torch_private.become(p, values.pop(name).to(there, p.dtype))
    return nn.parallel.DistributedDataParallel(
        model.to(there), device_ids=None if there.type == "cpu" else [there]
    )


def _of_files(model: nn.Module, weights: Path) -> dict[str, torch.Tensor]:
    files = open_weights(weights, model)
    parts = partition(model, {})
    found = match_files(files, model, parts.parameters)
    managed = frozenset(map(id, parts.parameters))
    Others(files, model, set(found.values()), managed).load()
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(parts.parameters[index])]: files.read(name) for index, name in found.items()}


def _initial(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """By parameter, a rank's rows of its first values; memory for one unit more is taken."""
    parts = partition(model, dict.fromkeys(model.parameters(), 0))
    names = {id(p): name for name, p in model.named_parameters()}
    init = default_init(model)
    mine: dict[str, torch.Tensor] = {}
    for unit in parts.units:
        specs = {spec.index: spec for _, spec in unit.params}
        for index, value in initialise(parts.found[unit.index], specs, parts, init).items():
            p = parts.parameters[index]
            first, last = rows_of_rank(value.shape[0], ranks.rank, ranks.size)
            mine[names[id(p)]] = value[first:last].clone()
            torch_private.become(p, torch.empty_like(value, device="meta"))
    return mine


def without_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Inside, gradients are summed over ranks if this is the last micro-batch of a step."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()
