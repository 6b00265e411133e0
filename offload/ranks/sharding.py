"""The setup of an engine for this rank's shards of a model that is spread over ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checks import check_modules
from ..config import OffloadConfig
from ..engine import Engine
from ..errors import LifecycleError, RankError
from ..facts.rates import Rates
from ..model_marks import MADE, ModelMarks, hold
from ..movement.accelerators.make import make_accelerator
from ..optim.joint import JointOptimizer
from ..optim.registry import rules_for
from ..optim.rule import is_whole
from ..optim.single_step import name_of
from ..params.conversions import Conversions
from ..params.pickling import Pickling
from ..planning.blueprint import Blueprint
from ..plans import calibrated
from ..state.hub_names import forget_quantisation
from ..state.module_states import warn_not_committed
from ..step.param_group_check import ParamGroupCheck
from ..wrapping import MakeBlueprint, opened
from .bridge import Bridge
from .ddp import Replicated
from .ddp_bridge import ReplicaBridge
from .ddp_optimizer import ReplicatedOptimizer
from .filling import draw_adapters, require_files_of_buffers
from .fsdp import FullySharded
from .fsdp_optimizer import ShardedOptimizer
from .fsdp_private import is_sharded, ranks_of
from .gathering import Gatherer
from .parts import SpreadModule, require_initialised
from .shards import Shards, gathered_bytes, optimizer_over
from .spread_optimizers import SpreadOptimizer
from .world import World, fitting_machine

log = logging.getLogger("overspill")
Made = TypeVar("Made")
_OWN = ("device", "extra", "init", "rates", "verbose", "weights")  # may differ by rank
# These control how weights are created or moved, which FSDP2 or DDP does here.
_NOT_HERE = ("units", "init")


class Sharding:
    """This rank's part of a model, before and while it has an engine.

    Attributes:
        model: the model whose parameter names are used in stores.
        world: the ranks.
        shards: this rank's part, as a model of its own.
    """

    def __init__(
        self, model: nn.Module, world: World, *, device: torch.device | str | None, filled: bool
    ) -> None:
        """
        Args:
            filled: weights come from elsewhere, so the values of the shards do not matter.
            device: the device of shards that have no memory yet.

        Raises:
            OffloadError: the model is not spread over ranks in a way that can be wrapped.
        """
        for module in model.modules():
            if MADE in module.__dict__:
                raise LifecycleError(
                    "the model is wrapped already; call overspill.unwrap(model) first"
                )
        self._way: Replicated | FullySharded
        if isinstance(model, DistributedDataParallel):
            self._way = Replicated(model, filled=filled)
        else:
            self._way = FullySharded(model, device=device, filled=filled)
        self.model = self._way.model
        self.world = world
        self._parts: Sequence[SpreadModule] = self._way.parts
        try:
            check_modules(self.model)
            self.shards = self._made_shards()
        except BaseException:
            self._way.give_back()
            raise
        self._bridges: list[Bridge | ReplicaBridge] = []
        self._conversions: Conversions | None = None
        self._pickling: Pickling | None = None
        self._marks: ModelMarks | None = None
        frozen = any(not p.requires_grad for p in self.model.parameters())
        self._may_share = frozen and isinstance(self._way, FullySharded)

    def _made_shards(self) -> Shards:
        way = self._way
        made = Shards(
            self.model, self._parts, ranks=way.ranks, tensor_ranks=way.tensor_ranks,
            hooked=way.hooked,
        )  # fmt: skip
        # DDP's weights are the user's own; FSDP2 only reads shards when it gathers them.
        made.stay = isinstance(way, Replicated)
        return made

    @property
    def device(self) -> torch.device:
        """The device of the model's trained parameters; frozen ones may be elsewhere."""
        return max(self.model.parameters(), key=lambda p: p.requires_grad).device

    @property
    def lacks_values(self) -> bool:
        """Whether a parameter is on ``meta``."""
        return any(p.is_meta for p in self.model.parameters())

    def offload_frozen(self) -> None:
        """Let frozen weights leave the device under DDP, too, where each rank has them whole."""
        self._way.offload_frozen()
        self.shards = self._made_shards()
        self._may_share = self._may_share or any(self._way.hooked.values())

    def refuse(self, config: OffloadConfig) -> None:
        """Refuse options that this strategy does not support.

        Raises:
            ValueError: an option is not supported.
        """
        refuse_options(config)
        self._way.refuse(config)

    def fill(self, weights: Path | Mapping[str, Path]) -> None:
        """Prepare what is on ``meta`` for the engine, which reads the shards' weights from files.

        Raises:
            ValueError: the files lack a buffer.
            OffloadError: adapters have an initialisation that is not known.
        """
        if isinstance(self._way, FullySharded):
            left = self._way.without_values
            require_files_of_buffers(self.model, left, weights)
            draw_adapters(self.model, self.shards, left, self.world)

    def release(self, *, broken: bool = False) -> None:
        """Stop communication with the other ranks.

        Args:
            broken: a round of weights failed, and messages of it may be left unread.
        """
        self.world.close(broken=broken)

    def let_go(self) -> None:
        """Detach overspill and restore the sharding from before ``wrap``."""
        self._share_nothing()
        for bridge in self._bridges:
            bridge.give_back()
        self._bridges.clear()
        if self._conversions is not None:
            self._conversions.remove()
        if self._pickling is not None:
            self._pickling.remove()
        if self._marks is not None:
            self._marks.remove()
        self._way.give_back()

    def config(self, config: OffloadConfig, optimizer: torch.optim.Optimizer) -> OffloadConfig:
        """Return this rank's options.

        Raises:
            ValueError: ranks were given different options, or optimizers.
            OffloadError: a rank has nothing to commit.
        """
        refuse_optimizer(optimizer)
        given = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OWN}
        given["the optimizer"] = type(optimizer).__qualname__
        given["the number of param groups"] = len(optimizer.param_groups)
        self.world.require_alike(given)
        if config.nvme is not None:
            has = self.world.gathered(bool(self.shards.local))
            if empty := [rank for rank, some in enumerate(has) if not some]:
                raise RankError(
                    f"rank {empty[0]} has no row of any parameter, so it has nothing to commit; "
                    "use fewer ranks, or leave nvme out"
                )
            if config.durable and self.world.rank == 0:
                warn_not_committed(self.model)
        device = config.device or str(self.device)
        self._way.cast(config.weight_dtype)
        whole = replace(config, device=device)
        measured = self._rates(whole, optimizer)
        rates = self.world.rates(measured, on_cpu=device == "cpu")
        units = tuple(self.shards.units)
        # FSDP2 copies weights to where they compute, even if it gathers them from one rank only.
        gathers = gathered_bytes(self.shards) if isinstance(self._way, FullySharded) else 0
        if self._may_share:
            self.shards.shared_memory = self.world.shared_memory(self.shards.frozen_regions())
        own = self.world.share(whole, gathers)
        return replace(own, rates=rates, units=units)

    def agree(self, plan: MakeBlueprint, config: OffloadConfig) -> Blueprint:
        """Return a blueprint with the same shared host memory as those of the ranks that share it.

        Plans differ if devices have different memory free. They are then made for the smallest, and
        if they differ for another reason, nothing is shared. See Note [Shared host memory]. Of a
        plan that does not fit, the budgets that would fit are those of all ranks.
        """
        made = plan(config)
        for attempt in range(2 if self._may_share else 0):
            shared = self.shards.shared_memory
            mine = () if shared is None else shared.members
            found = self.world.gathered((mine, made.layout.shared_places, made.budgets.device))
            alike = [all(found[rank][1] == places for rank in members)
                     for members, places, _ in found]  # fmt: skip
            if all(alike):
                break
            if alike[self.world.rank]:
                continue  # others plan again
            if attempt:
                self._share_nothing()
                made = plan(config)
                continue
            devices = [nbytes for rank in mine if (nbytes := found[rank][2]) is not None]
            if devices:
                made = plan(replace(config, device_memory=min(devices), leave=0))
        needs = self.world.gathered(made.plan.detail.fitting)
        return replace(made, plan=fitting_machine(made.plan, self.world.local_size, needs))

    def _share_nothing(self) -> None:
        shared, self.shards.shared_memory = self.shards.shared_memory, None
        if shared is not None:
            shared.close()

    def _rates(self, config: OffloadConfig, optimizer: torch.optim.Optimizer) -> Rates:
        """Return the machine's rates, which the first of its ranks measures."""

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

    def made_by(
        self, optimizer: torch.optim.Optimizer, *, filled: bool = False
    ) -> Callable[[Engine], SpreadOptimizer]:
        """Return a function that creates the user's optimizer for an engine.

        Args:
            filled: the engine's weights come from elsewhere, so they differ from the model's.
        """

        def make(engine: Engine) -> SpreadOptimizer:
            runtime, external_forward = engine.runtime, engine.external_forward
            external_forward.spread(self.world.norm, self._copies(engine))
            if runtime.store.writer is not None:
                runtime.store.writer.agree_by(self.world.votes)
            made = self._made(engine, optimizer, filled=filled)
            # From here on every rank has an engine, and shared host memory is filled.
            digests = self.world.gathered(runtime.store.digests())
            if self.shards.shared_memory is not None:
                runtime.store.expect(digests[self.shards.shared_memory.members[0]])
                self.shards.shared_memory.close()
            for bridge in self._bridges:
                bridge.begin()
            self._way.begin()
            self._marks = ModelMarks(self._way.held[0], lambda: False)
            self._marks.put(None)
            hold(self._way.held[0], made)
            if isinstance(self._way, Replicated):
                self._pickling = Pickling(self._way.ddp)
            ids = set(map(id, self.model.parameters()))
            self._conversions = Conversions(
                self.model, lambda p: id(p) in ids, lambda: runtime.closed
            )
            return made

        return make

    def _copies(self, engine: Engine) -> dict[int, int]:
        """Return how many ranks have the same region, by parameter; none: each has its own."""
        index = {id(p): number for number, p in enumerate(engine.parameters)}
        copies = {
            index[id(p)]: self.world.size // shard.ranks
            for shard, p in zip(self.shards.shards, self.shards.local, strict=True)
        }
        return {number: count for number, count in copies.items() if count > 1}

    def _made(
        self, engine: Engine, optimizer: torch.optim.Optimizer, *, filled: bool
    ) -> SpreadOptimizer:
        external_forward, shards, way = engine.external_forward, self.shards, self._way
        if isinstance(way, FullySharded):
            group_check = ParamGroupCheck(way.model, optimizer.param_groups, in_place=False)
            sharded = Bridge(way.model, way.parts, shards, external_forward, group_check)
            self._bridges.append(sharded)
            sharded.attach()
            return ShardedOptimizer(engine, optimizer, sharded, shards, self)
        gatherer = Gatherer(
            external_forward.copied, external_forward.accelerator, self.world.weights()
        )
        group_check = ParamGroupCheck(way.model, optimizer.param_groups)
        parts = [part for part in way.parts if part.shards]
        replicated = ReplicaBridge(way.ddp, parts, shards, external_forward, gatherer, group_check)
        self._bridges.append(replicated)
        replicated.attach()
        if filled:
            replicated.owe(frozen=True)
        return ReplicatedOptimizer(engine, optimizer, replicated, shards, self, self.world)

    def optimizer_over(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer like the given one over this rank's shards.

        Raises:
            ValueError: it has a parameter that is not in the model.
        """
        known = {id(shard.param) for shard in (*self.shards.shards, *self.shards.empty)}
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in known:
                    raise ValueError(
                        f"param group {number} holds a parameter of shape {tuple(p.shape)} that is "
                        "not in the model; build the optimizer from model.parameters(), after the "
                        "model was spread over ranks"
                    )
        return optimizer_over(self.shards, optimizer)


def on_all_ranks(
    model: nn.Module, work: Callable[[Sharding], Made], *, device: torch.device | str | None,
    filled: bool,
) -> Made:  # fmt: skip
    """Run ``work``, which gives a model its engine, so that it succeeds on all ranks or on none.

    Only the first rank logs messages at level ``INFO`` and below.

    Returns:
        The result of ``work``.
    """
    require_initialised()
    replicated = isinstance(model, DistributedDataParallel)
    ranks: Sequence[int] | None
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(model.process_group)
    else:
        ranks = ranks_of(model)
    if ranks is None:
        name = next(name for name, _ in model.named_parameters())
        raise RankError(
            f"parameter {name!r} is not sharded by fully_shard; call fully_shard on the whole model"
        )
    world, begun = World(ranks, weights=replicated), list[Sharding]()
    quiet = _Quiet(world.rank)

    def bring() -> Made:
        begun.append(Sharding(model, world, device=device, filled=filled))
        return work(begun[0])

    log.addFilter(quiet)
    try:
        return world.all_or_none(bring)
    except BaseException:
        try:
            for sharding in begun:
                sharding.let_go()
        finally:
            world.close()
        raise
    finally:
        log.removeFilter(quiet)


def refuse_options(config: OffloadConfig) -> None:
    """Refuse options that models spread over ranks do not support.

    Raises:
        ValueError: an option is not supported.
    """
    for each in fields(config):
        if each.name in _NOT_HERE and getattr(config, each.name) != each.default:
            raise ValueError(
                f"{each.name}={getattr(config, each.name)!r} is not for a sharded model, nor for "
                "one inside of DistributedDataParallel: they have their weights where they are; "
                "leave it out"
            )
    if config.loss == "chunked":
        raise ValueError(
            "loss='chunked' is not for a sharded model, nor for one inside of "
            "DistributedDataParallel, whose head may be on other ranks; leave it out"
        )
    if config.tile not in (None, "auto"):
        raise ValueError(
            "tile= is not for a sharded model, nor for one inside of DistributedDataParallel; "
            "leave it out"
        )


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that cannot update shards.

    Raises:
        TypeError: it is one of these.
    """
    if isinstance(optimizer, JointOptimizer):
        raise TypeError(
            "a list of optimizers is not possible under FSDP2 and DDP; give all parameters to the "
            "param groups of one optimizer"
        )
    if any(map(is_whole, rules_for(optimizer))):
        raise TypeError(
            f"{name_of(optimizer)} needs whole parameters, and under FSDP2 and DDP each rank "
            "updates parts of them; use an optimizer that updates element by element, such as "
            "torch.optim.AdamW"
        )


class _Quiet(logging.Filter):
    """Drops messages at level ``INFO`` and below on all ranks but the first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self._rank == 0 or record.levelno > logging.INFO


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
        files = config.weight_files
        if files is not None or config.frozen is not None:
            sharding.offload_frozen()
        sharding.refuse(config)
        if files is not None:
            sharding.fill(files)
        mine = sharding.optimizer_over(optimizer)
        sharding.world.refuse_runs(config.nvme or ())
        own = sharding.config(config, mine)
        make = sharding.made_by(optimizer, filled=files is not None)
        return opened(sharding.shards, mine, own, make, sharding.agree)

    made = on_all_ranks(model, bring, device=config.device, filled=config.weights is not None)
    forget_quantisation(model)
    optimizer.state.clear()
    return made
