"""Wraps a model that is spread over ranks: gives each rank an engine for its shards."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import OffloadConfig
from ..state.hub_names import forget_quantisation
from ..wrapping import opened
from .fsdp_private import is_sharded
from .optimizer import SpreadOptimizer
from .sharding import Sharding, on_all_ranks, refuse_options

__all__ = ["is_spread", "wrapped_shards"]


def is_spread(model: nn.Module) -> bool:
    """Return whether the model is one with those of other ranks."""
    return isinstance(model, DistributedDataParallel) or is_sharded(model)


def wrapped_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> SpreadOptimizer:
    """Wrap a model that is spread over ranks. See ``wrap``.

    Every rank must call it with the same options.
    """
    refuse_options(config)

    def bring(sharding: Sharding) -> SpreadOptimizer:
        sharding.refuse(config)
        if config.weights is not None:
            sharding.fill(config.weights, config.ignore_weights or ())
        mine = sharding.optimizer_over(optimizer)
        sharding.world.refuse_runs(config.nvme or ())
        own = sharding.config(config, mine)
        return opened(sharding.shards, mine, own, sharding.made_by(optimizer))

    made = on_all_ranks(model, bring, device=config.device, filled=config.weights is not None)
    forget_quantisation(model)
    optimizer.state.clear()
    return made
