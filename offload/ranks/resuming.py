"""Resumes training from the stores of many ranks: on as many ranks, on others, or on one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..config import MissingWeights, OffloadConfig
from ..durable.commits import restore_groups
from ..durable.meta import decode_facts, random_states, regions_of, restore_random_states
from ..durable.resume import (
    formats_of,
    optimizer_for,
    warn_of_kept_options,
    with_formats,
)
from ..engine import Engine
from ..errors import StoreError
from ..io_engine.committed import FoundStore, OwnedStore, find_store, own_store
from ..io_engine.manifest_repair import go_back
from ..optim.registry import rules_for
from ..optimizer import OffloadedOptimizer
from ..planning.blueprint import Blueprint
from ..planning.regions import TensorRegion
from ..private import torch_private
from ..state.unmanaged import UnmanagedState
from ..wrapping import MakeBlueprint, opened, reopened
from .filling import memory_of
from .sharding import Sharding, on_all_ranks
from .stores import RunSource, RunStores, find_run, names_in

log = logging.getLogger("overspill")
Made = TypeVar("Made", bound=OffloadedOptimizer)
Files = Path | Mapping[str, Path] | None  # where files are that the run reads weights from
_FACTS = ("its shape", "its dtype", "the param group that trains it")


class RegionState(Mapping[str, Any]):
    """The state of a region of a parameter, each tensor of which is read on access."""

    def __init__(self, source: RunSource, name: str, region: TensorRegion) -> None:
        self._source, self._name, self._region = source, name, region

    def __getitem__(self, key: str) -> Any:
        if key not in self._source.state_names(self._name):
            raise KeyError(key)
        return self._source.state(self._name, key, self._region)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.state_names(self._name))

    def __len__(self) -> int:
        return len(self._source.state_names(self._name))


def resumed_shards(
    model: nn.Module, folders: Sequence[Path], optimizer: torch.optim.Optimizer | None,
    options: dict[str, Any],
) -> tuple[OffloadedOptimizer, Any]:  # fmt: skip
    """Resume on many ranks; every rank must call it with the same arguments. See ``resume``."""

    def bring(sharding: Sharding) -> tuple[OffloadedOptimizer, Any]:
        config = OffloadConfig.from_options({"nvme": folders, **_given(options)})
        world, files = sharding.world, config.weight_files
        run = find_run(folders) or RunStores([find_store(folders)], ranks=False)
        if sharding.lacks_values or _leave_device(run):
            sharding.offload_frozen()
        sharding.refuse(config)
        world.gathered(None)  # no rank changes a store before all have read it
        same = run.ranks and len(run.stores) == world.size and options.get("nvme") is None
        if same:
            _require_units(sharding, run.stores[world.rank])
            with _agreed(run, world.rank) as store:
                made = _same(sharding, store, optimizer, options, files)
        else:
            made = _others(sharding, run, folders, optimizer, options, files)
        log.info("overspill: resumed at step %d", run.step)
        return made

    return on_all_ranks(model, bring, device=options.get("device"), filled=True)


def resumed_whole(
    model: nn.Module, run: RunStores, folders: Sequence[Path],
    optimizer: torch.optim.Optimizer | None, options: dict[str, Any],
) -> tuple[OffloadedOptimizer, Any]:  # fmt: skip
    """Resume on one rank from the stores of several. See ``resume``."""
    given = OffloadConfig.from_options({"nvme": folders, **_given(options)})
    source, before = RunSource(run, given.weight_files), None
    try:
        optimizer = optimizer or _optimizer(model, source)
        before = _Before(model, optimizer, memory_of(options.get("device")))
        config = OffloadConfig.from_options(_formats(source, options, folders))
        _require_like(source, model, optimizer, config)
        config = _in_place(config, source, 0, 1)
        regions = {name: (p, TensorRegion.all_of(p.shape)) for name, p in model.named_parameters()}
        for name in source.in_place:
            before.replace(regions[name][0], _weight(source, name, *regions[name]))

        def filled(plan: MakeBlueprint, config: OffloadConfig) -> Blueprint:
            """Read weights once they are known to fit, so that few are in memory twice."""
            planned = plan(config)
            if planned.plan.fits or planned.plan.detail.activations_short:
                before.forget_weights()
                for name, (p, region) in regions.items():
                    if name in source.in_place:
                        continue
                    value = _weight(source, name, p, region, config.weight_dtype or p.dtype)
                    torch_private.become(p, value)
            return planned

        extra = _fill(model, optimizer, source, regions, 0, memory_of(config.device))
        make = partial(OffloadedOptimizer, inner=optimizer)
        made = opened(model, optimizer, config, _from_step(run.step, make), filled)
        log.info("overspill: resumed at step %d, of %d ranks' stores", run.step, len(run.stores))
        return made, extra
    except BaseException:
        if before is not None:
            before.restore()
        raise
    finally:
        source.close()


def _agreed(run: RunStores, rank: int) -> OwnedStore:
    """Open a rank's own store at the commit that all ranks have."""
    wanted, directories = run.generations[rank], run.stores[rank].directories
    store = own_store(directories)
    try:
        if store.last().number == wanted.number:
            return store
        go_back(store.manifests[0], wanted)
    except BaseException:
        store.locks.release()
        raise
    store.locks.release()
    return own_store(directories)


def _require_units(sharding: Sharding, store: FoundStore) -> None:
    """Require stores of a model that was spread in the same way.

    Raises:
        OffloadError: the stores of some rank have other parameters.
    """
    theirs = sorted(names_in(store))
    mine = sorted(name for name, _ in sharding.shards.named_parameters())
    places = decode_facts(store.last().meta).get("regions", {})
    alike = theirs == mine and places in ({}, regions_of(sharding.shards))
    if not all(sharding.world.gathered(alike)):
        raise StoreError(
            f"the stores in {store.directories[0].parent} are of a model that was spread in "
            "another way (FSDP2 or DistributedDataParallel, another mesh, or fully_shard of other "
            "modules); pass nvme= with another folder to continue in"
        )


def _same(
    sharding: Sharding, store: OwnedStore, optimizer: torch.optim.Optimizer | None,
    options: dict[str, Any], files: Files,
) -> tuple[OffloadedOptimizer, Any]:  # fmt: skip
    """Resume on the same number of ranks: each continues in its own store."""
    source = RunSource(RunStores([store]), files)
    try:
        optimizer = optimizer or _optimizer(sharding.model, source)
    finally:
        source.close()
    mine = sharding.optimizer_over(optimizer)
    given = with_formats(store, {**options, "units": None, "nvme": None})
    given.update(units=None, nvme=[folder.parent for folder in store.directories])
    config = sharding.config(OffloadConfig.from_options(given), mine)
    made, extra = reopened(
        store, sharding.shards, mine, config, sharding.made_by(optimizer, filled=True),
        sharding.agree,
    )  # fmt: skip
    optimizer.state.clear()
    return made, extra


def _others(
    sharding: Sharding, run: RunStores, folders: Sequence[Path],
    optimizer: torch.optim.Optimizer | None, options: dict[str, Any], files: Files,
) -> tuple[OffloadedOptimizer, Any]:  # fmt: skip
    """Resume on another number of ranks.

    Each reads its rows out of all stores, and starts a store of its own. Frozen weights that the
    run has read in place still are.
    """
    world, source, before = sharding.world, RunSource(run, files), None
    try:
        optimizer = optimizer or _optimizer(sharding.model, source)
        device = sharding.device
        before = _Before(sharding.model, optimizer, device)
        config = OffloadConfig.from_options(_formats(source, options, folders))
        _require_like(source, sharding.model, optimizer, config)
        config = _in_place(config, source, world.rank, world.size)
        regions = {}
        for shard, p in zip(sharding.shards.shards, sharding.shards.local, strict=True):
            regions[shard.name] = p, shard.region
            # Uses new memory: the model's own is kept until all ranks have an engine.
            before.replace(p, _weight(source, shard.name, p, shard.region))
        mine = sharding.optimizer_over(optimizer)
        extra = _fill(sharding.model, mine, source, regions, world.rank, device)
        world.refuse_runs(config.nvme or (), {world.size})  # an older run, not the resumed one
        own = sharding.config(config, mine)
        make = _from_step(run.step, sharding.made_by(optimizer, filled=True))
        made = opened(sharding.shards, mine, own, make, sharding.agree)
        optimizer.state.clear()
        return made, extra
    except BaseException:
        if before is not None:
            before.restore()
        raise
    finally:
        source.close()


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _leave_device(run: RunStores) -> bool:
    """Return whether frozen weights may leave the device under DDP, as in the run so far.

    A run on one device, or under FSDP2, has packed them or reads them in place.
    """
    description, facts = run.stores[0].layout.description, decode_facts(run.generations[0].meta)
    in_place = description.get("sources", {}).get("units")
    return bool(facts.get("hooked") or in_place) or description.get("frozen") is not None


def _optimizer(model: nn.Module, source: RunSource) -> torch.optim.Optimizer:
    facts = {**source.facts_of(0), "members": source.members}
    return optimizer_for(model, source.run.stores[0].layout.description, facts)


def _in_place(config: OffloadConfig, source: RunSource, rank: int, ranks: int) -> OffloadConfig:
    """Return the options for weights that the run has read in place, if any.

    Raises:
        ValueError: options are given that are for ``wrap``.
    """
    for name in ("init",) if source.in_place else ("weights", "init"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}= is for wrap: resume takes the weights of the store")
    if not source.in_place:
        return config
    return replace(config, weights=MissingWeights(source.files_in_place(rank, ranks)))


def _weight(
    source: RunSource, name: str, p: nn.Parameter, region: TensorRegion,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a region of a weight for ``p``; it is on ``meta`` if it will be read in place."""
    if name in source.in_place:
        return torch.empty(region.shape, dtype=dtype or p.dtype, device="meta")
    value = source.weight(name, region)
    return value.to("cpu" if p.is_meta else p.device, dtype or value.dtype)


def _formats(
    source: RunSource, options: dict[str, Any], folders: Sequence[Path]
) -> dict[str, Any]:  # fmt: skip
    """Return the options, completed with the formats of the stores."""
    layout = source.run.stores[0].layout
    given = formats_of(layout.description, options)
    given.pop("durable", None)
    if given.get("checksum") is None:
        given["checksum"] = layout.checksum
    if given.get("nvme") is None:
        given["nvme"] = list(folders)
    return given


def _require_like(
    source: RunSource, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> None:
    """Require stores of the same model and optimizer.

    Raises:
        OffloadError: they are of another model or optimizer.
    """
    rule, kept = rules_for(optimizer)[0].name, source.optimizer
    if rule != kept:
        raise StoreError(f"the stores were trained with {kept}, not {rule}")
    groups = {
        id(p): number for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }  # fmt: skip
    mine = {
        name: (tuple(p.shape), config.weight_dtype or p.dtype, groups.get(id(p)))
        for name, p in model.named_parameters()
    }
    for name in sorted(mine.keys() ^ source.parameters.keys()):
        where = "the model" if name in mine else "the stores"
        raise StoreError(f"parameter {name!r} is in {where} alone")
    for name, here in mine.items():
        for what, ours, theirs in zip(_FACTS, here, source.parameters[name], strict=True):
            if ours != theirs:
                raise StoreError(
                    f"parameter {name!r}: {what} is {theirs} in the stores, and {ours} in the model"
                )


def _fill(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: RunSource,
    regions: Mapping[str, tuple[nn.Parameter, TensorRegion]], rank: int, device: torch.device,
) -> Any:  # fmt: skip
    """Set the optimizer, buffers and random generators to what the stores hold.

    The optimizer's state is read when it is loaded. A rank that did not exist keeps its random
    states.

    Args:
        device: the device that the rank computes on.

    Returns:
        The commit's ``extra``.
    """
    facts = source.facts_of(rank)
    buffers = UnmanagedState(model, source.buffers)
    if rank == 0:
        warn_of_kept_options(optimizer.param_groups, facts["groups"])
    restore_groups(optimizer.param_groups, facts["groups"])
    buffers.restore()
    if rank < len(source.run.stores):
        restore_random_states(facts["rng"], device)
    optimizer.state.clear()
    for name, (p, region) in regions.items():
        if source.state_names(name):
            optimizer.state[p] = RegionState(source, name, region)  # type: ignore[assignment]
    return facts["extra"]


class _Before:
    """The former state of a model and its optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._groups = [
            (group, {k: _kept(v) for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
        ]
        self._buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
        self._state, self._kept_state = optimizer.state, dict(optimizer.state)
        self._device, self._random = device, random_states(device)
        self._weights: list[tuple[nn.Parameter, torch.Tensor]] | None = []

    def replace(self, p: nn.Parameter, value: torch.Tensor) -> None:
        """Give a parameter another value."""
        assert self._weights is not None
        self._weights.append((p, p.detach()))
        torch_private.become(p, value)

    def forget_weights(self) -> None:
        """Free former values of parameters: from here on, they are not restored."""
        self._weights = None

    def restore(self) -> None:
        if self._weights is None:
            log.error(
                "overspill: the model's former weights could not be given back; they are those of "
                "the run, or on the meta device: build the model again"
            )
        for p, value in self._weights or ():
            torch_private.become(p, value)
        for group, kept in self._groups:
            group.update(kept)
        for buffer, value in self._buffers:
            buffer.detach().copy_(value)
        self._state.clear()
        self._state.update(self._kept_state)
        restore_random_states(self._random, self._device)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _from_step(step: int, make: Callable[[Engine], Made]) -> Callable[[Engine], Made]:
    """Wrap ``make`` for an engine that has already taken ``step`` steps."""

    def made(engine: Engine) -> Made:
        runtime = engine.runtime
        ledger = runtime.ledger
        ledger.restore(step, list(ledger.steps))
        return make(engine)

    return made
