"""How a sharded model gets an engine for its shards, rank by rank."""

from __future__ import annotations

import torch
from torch import nn

from ..config import OffloadConfig
from ..wrapping import opened
from .fsdp_private import is_sharded
from .optimizer import ShardedOptimizer
from .sharding import Sharding, refuse_options

__all__ = ["is_sharded", "wrapped_shards"]


def wrapped_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> ShardedOptimizer:
    """See ``wrap``: every rank calls it, with the same options."""
    refuse_options(config)
    sharding = Sharding(model)
    try:
        with sharding.one_speaks():
            mine = sharding.optimizer_over(optimizer)
            own = sharding.config(config, mine)
            made = opened(sharding.shards, mine, own, sharding.made_by(optimizer))
    except BaseException:
        sharding.close()
        raise
    optimizer.state.clear()
    return made
