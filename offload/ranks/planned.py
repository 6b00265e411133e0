"""Plans of one rank of a model under FSDP2, without starting ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config import OffloadConfig, parse_size
from ..facts.machine import Machine
from ..movement.accelerators.make import make_accelerator
from ..open_engines import untaken
from ..optim.untrained import NoOptimizer
from ..planning.budgets import machine_budgets, resolve_budgets
from ..planning.plan import Budgets, Plan
from ..planning.unit_discovery import ROOT, FoundUnit, units_to_shard
from ..plans import calibrated, make_plan, options_for
from .ddp import Replica, ReplicatedModule
from .sharding import refuse_optimizer, refuse_options
from .shards import ShardGroup, Shards, gathered_bytes
from .world import fitting_machine, rates_of_rank


def plan_of_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any],
    ranks: int, *, machine: Machine | None = None, **how: Any,
) -> Plan:  # fmt: skip
    """Return the plan of one of ``ranks`` that share a machine; see ``plan``.

    Each of them has a device of its own, and an equal part of host memory, disks and processors.
    The plan is that of rank 0, which has the most rows.

    Raises:
        ValueError: an option is not possible for a sharded model.
        TypeError: the optimizer is not.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    if how.get("example") is not None:
        raise ValueError("ranks: example= runs the whole model on one device; give tokens= instead")
    options = options_for(machine, options)
    units = options.pop("units", None)
    config = OffloadConfig.from_options(options)
    refuse_options(config)
    if optimizer is None:
        config = config.for_inference()
    else:
        refuse_optimizer(optimizer)
    shards = planned_shards(model, ranks, units)
    accelerator = make_accelerator(config.device, config.rates)
    try:
        trained = NoOptimizer() if optimizer is None else optimizer
        given, _ = calibrated(
            model, trained, config, accelerator, remeasure=bool(how.pop("measure", False))
        )
        there = accelerator.device if accelerator.has_device_memory else None
        if there is not None:
            config = _leaving(config, gathered_bytes(shards, config.weight_dtype))
        if machine is not None and machine.host_memory is not None:
            whole = machine_budgets(config, machine)
        else:
            whole = resolve_budgets(config, there, untaken())
    finally:
        accelerator.close()
    assert given.rates is not None
    rates = rates_of_rank(given.rates, ranks, 1 / ranks, on_cpu=there is None)
    if machine is not None:
        machine = replace(machine, rates=rates)
    mine = {"rates": rates, "leave": 0, **_share(whole, ranks)}
    local = None if optimizer is None else _optimizer_over(shards, optimizer)
    plan = make_plan(shards, local, {**options, **mine, "units": shards.units}, machine=machine,
                     **how)  # fmt: skip
    return fitting_machine(plan, ranks)


def _optimizer_over(shards: Shards, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer like the given one over a rank's shards, without state."""
    mine: torch.optim.Optimizer = object.__new__(type(optimizer))
    mine.__dict__.update(vars(optimizer))
    groups = [
        ShardGroup(group, [local for p in group["params"]
                           if (local := shards.local_of.get(id(p))) is not None])
        for group in optimizer.param_groups
    ]  # fmt: skip
    mine.param_groups, mine.state = groups, defaultdict(dict)  # type: ignore[assignment]
    return mine


def _leaving(config: OffloadConfig, gathered: int) -> OffloadConfig:
    """Return options that leave device memory to FSDP2, if they do not give the budget in bytes."""
    if parse_size(config.device_memory, "device_memory").nbytes is not None:
        return config
    leave = {"device": config.left_bytes("device") + gathered}
    if parse_size(config.host_memory, "host_memory").nbytes is None:
        leave["host"] = config.left_bytes("host")
    return replace(config, leave=leave)


def _share(whole: Budgets, ranks: int) -> dict[str, int]:
    """Return a rank's budgets, as options."""
    found = {"host_memory": whole.host // ranks}
    if whole.nvme is not None:
        found["nvme_memory"] = whole.nvme // ranks
    if whole.device is not None:
        found["device_memory"] = whole.device
    return found


def planned_shards(model: nn.Module, ranks: int, units: Sequence[str] | None = None) -> Shards:
    """Return the first rank's shards of a model after ``fully_shard`` of its ``units_to_shard``."""
    names = {id(p): name for name, p in model.named_parameters()}

    def group(runs: FoundUnit, params: Iterable[nn.Parameter]) -> list[ReplicatedModule]:
        mine = [p for p in params if id(p) in names]
        shards = [Replica(names.pop(id(p)), p, 0, ranks) for p in mine]
        return [ReplicatedModule(runs, shards)] if shards else []

    modules = units_to_shard(model, units)
    groups = [each for found in modules for each in group(found, found.module.parameters())]
    rest = frozenset(p for p in model.parameters() if id(p) in names)
    root = FoundUnit(ROOT, model, direct_only=True, computes_with=rest)
    return Shards(model, [*group(root, model.parameters()), *groups], ranks=ranks)
