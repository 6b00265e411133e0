"""A sharded model, its ranks and its shards, on the way to an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import OffloadConfig
from ..engine import OPTIMIZER, Engine
from ..errors import OffloadError
from ..facts.rates import Rates
from ..movement.accelerators.choose import make_accelerator
from ..plans import calibrated
from .bridge import Bridge
from .fsdp_private import ShardedModule, sharded_modules
from .optimizer import ShardedOptimizer
from .shards import Shards, optimizer_over
from .world import World

log = logging.getLogger("overspill")
# What says how weights are made or moved, which is FSDP2's here.
_NOT_HERE = ("precision", "frozen", "units", "resident", "weights", "init", "tokens")


class Sharding:
    """What a rank has of a model, before there is an engine and while there is one.

    Attributes:
        world: the ranks.
        shards: this rank's part, as a model of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Raises:
            OffloadError: the model is not sharded in a way that can be wrapped.
        """
        self.model, self._modules = model, sharded_modules(model)
        _refuse(model, self._modules)
        self.world = World(next(g for each in self._modules for g in each.process_groups))
        self.shards = Shards(model, self._modules)
        self._bridges: list[Bridge] = []

    def close(self) -> None:
        """Nothing came of it."""
        self.let_go()
        self.release()

    def release(self) -> None:
        """Nobody speaks with the other ranks any more."""
        self.world.close()

    def let_go(self) -> None:
        """The shards are FSDP2's own again, and the model nobody's."""
        for bridge in self._bridges:
            bridge.give_back()
        self._bridges.clear()
        for name in (OPTIMIZER, "__deepcopy__", "__reduce_ex__"):
            self.model.__dict__.pop(name, None)

    def config(self, config: OffloadConfig, optimizer: torch.optim.Optimizer) -> OffloadConfig:
        """This rank's options."""
        device = config.device or str(self.shards.local[0].device)
        whole = replace(config, device=device, activations="keep")
        rates = self.world.rates(self._rates(whole, optimizer))
        units = tuple(self.shards.units)
        return replace(self.world.share(whole), rates=rates, units=units, resident=units)

    def _rates(self, config: OffloadConfig, optimizer: torch.optim.Optimizer) -> Rates:
        """The machine's, measured by the first of its ranks."""

        def measure() -> Rates:
            accelerator = make_accelerator(config.device, config.rates)
            try:
                rates = calibrated(self.shards, optimizer, config, accelerator)[0].rates
                assert rates is not None
                return rates
            finally:
                accelerator.close()

        found: Rates = self.world.of_first_here(measure)
        return found

    def made_by(self, optimizer: torch.optim.Optimizer) -> Callable[[Engine], ShardedOptimizer]:
        """What makes the optimizer that users hold, once there is an engine."""

        def make(engine: Engine) -> ShardedOptimizer:
            machinery = engine.machinery
            driven = engine.driven
            driven.spread(self.world.norm)
            if machinery.store.writer is not None:
                machinery.store.writer.agree_by(self.world.voted)
            bridge = Bridge(self.model, self._modules, self.shards, driven)
            self._bridges.append(bridge)
            made = ShardedOptimizer(engine, optimizer, bridge, self.shards, self)
            self.model.__dict__.update({
                OPTIMIZER: made,
                "__deepcopy__": engine.__deepcopy__, "__reduce_ex__": engine.__reduce_ex__,
            })  # fmt: skip
            return made

        return make

    def optimizer_over(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """One like it, over this rank's shards."""
        return optimizer_over(self.shards, optimizer)

    @contextmanager
    def one_speaks(self) -> Any:
        """Inside, only the first rank says what all have to say."""
        quiet = _Quiet(self.world.rank)
        log.addFilter(quiet)
        try:
            yield
        finally:
            log.removeFilter(quiet)


def refuse_options(config: OffloadConfig) -> None:
    """
    Raises:
        ValueError: one of them is not for a sharded model.
    """
    for each in fields(config):
        if each.name in _NOT_HERE and getattr(config, each.name) != each.default:
            raise ValueError(
                f"{each.name}={getattr(config, each.name)!r} is not for a sharded model: its "
                "weights are made, cast and moved by FSDP2"
            )
    if config.activations not in ("auto", "keep"):
        raise ValueError(
            f"activations={config.activations!r} is not for a sharded model; leave it out"
        )


def _refuse(model: nn.Module, modules: list[ShardedModule]) -> None:
    """
    Raises:
        OffloadError: the model is not sharded in a way that can be wrapped.
    """
    if not dist.is_initialized():
        raise OffloadError("the model is sharded, but torch.distributed is not initialised")
    if OPTIMIZER in model.__dict__:
        raise OffloadError("the model is wrapped already; overspill.unwrap(model) it first")
    known = {id(shard.param) for each in modules for shard in each.shards}
    for name, p in model.named_parameters():
        if id(p) not in known:
            raise OffloadError(
                f"parameter {name!r} is not sharded by fully_shard; call fully_shard on the whole "
                "model too, without ignored_params"
            )
        if p.is_meta:
            raise OffloadError(
                f"parameter {name!r} is on meta; model.to_empty(device=...) and initialise it first"
            )
    if any(each.replicates for each in modules):
        raise OffloadError(
            "fully_shard with a mesh of two dimensions (HSDP, tensor parallelism) is not "
            "supported: several ranks would update one shard; use a mesh of one dimension"
        )
    if any(shard.offloads for each in modules for shard in each.shards):
        raise OffloadError(
            "fully_shard(offload_policy=CPUOffloadPolicy()) keeps shards in host memory itself, "
            "and overspill their state: leave offload_policy out"
        )


class _Quiet(logging.Filter):
    """One rank speaks for all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self._rank == 0 or record.levelno > logging.INFO
