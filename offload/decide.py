"""From a model, its optimizer and the options to a blueprint; nothing is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .config import OffloadConfig
from .engine import engine_of
from .errors import OffloadError
from .facts.machine import Machine
from .facts.tier import Tier
from .measure.calibration import Calibration, Task, calibrate
from .movement.accelerators.choose import Accelerator, make_accelerator
from .optim import Master, Rule
from .optim.bench import case_of
from .optim.formats import granule_of
from .optim.optimizer import moments_of
from .optim.registry import rules_for
from .planning.blueprint import Blueprint
from .planning.bounds import (
    Bound,
    device_update_share,
    device_update_worth,
    step_bound,
    trained_params,
)
from .planning.budgets import machine_budgets, resolve_budgets
from .planning.choose import Chosen, Load, choose_plan, foresee
from .planning.partition import Partition, partition
from .planning.plan import Budgets, Needs, Plan, PlanDetail, Preference
from .planning.subgroups import StateField
from .schedule.commits import saved_bytes
from .schedule.units import Chunk
from .training import torch_private
from .training.parameters import managed
from .training.profiling import profile_step


def _master_of(dtype: torch.dtype, config: OffloadConfig) -> Master:
    if dtype == torch.bfloat16:
        return "fp32" if config.master == "fp32" else "split"
    return "fp32" if dtype == torch.float16 else None


def _fields_of(
    rules: Sequence[Rule], config: OffloadConfig
) -> Callable[[Chunk], tuple[StateField, ...]]:
    def fields(chunk: Chunk) -> tuple[StateField, ...]:
        assert chunk.group is not None
        master = _master_of(chunk.dtype, config)
        return rules[chunk.group].state_fields(chunk.dtype, master, config.moments)

    return fields


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if engine_of(model) is not None:
        raise OffloadError("the model is wrapped already; overspill.unwrap(model) it first")
    for name, module in model.named_modules():
        if engine_of(module) is not None:
            raise OffloadError(f"module {name!r} is wrapped already; unwrap it first")
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise OffloadError(f"{kind} is not supported: overspill trains on one device")
        if getattr(module, "max_norm", None) is not None:
            raise OffloadError(
                f"module {name!r} changes its weight in forward (max_norm), which would be lost; "
                "set max_norm=None, and renormalise between step() and the next forward"
            )
    for name, p in model.named_parameters():
        _check_parameter(name, p)
    _refuse_overlaps(model)
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in own:
                raise ValueError(
                    f"param group {number} holds a parameter of shape {tuple(p.shape)} that is "
                    "not in the model; build the optimizer from model.parameters()"
                )


def _check_parameter(name: str, p: nn.Parameter) -> None:
    if managed(p) is not None:
        raise OffloadError(
            f"parameter {name!r} belongs to another wrapped model; unwrap that one first"
        )
    if torch_private.is_wrapper(p):
        kinds = f"{type(p).__name__} of {type(p.data).__name__}"
        raise OffloadError(
            f"parameter {name!r} is no plain tensor ({kinds}): models that are sharded (FSDP2, "
            "DTensor) or quantised are not supported; wrap the plain model, on one device"
        )


def _refuse_overlaps(model: nn.Module) -> None:
    """Raises if two parameters lie over the same memory: they would be parted without a word."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in model.named_parameters():
        if p.is_meta or not p.numel():
            continue
        start = int(p.storage_offset()) * p.element_size()
        last = sum((n - 1) * int(step) for n, step in zip(p.shape, p.stride(), strict=True))
        span = (start, start + (last + 1) * p.element_size(), name)
        spans.setdefault(torch_private.storage_key(p), []).append(span)
    for found in spans.values():
        found.sort()
        for (_, end, one), (start, _, other) in pairwise(found):
            if start < end:
                raise OffloadError(
                    f"parameters {one!r} and {other!r} lie over the same memory (tied by .data); "
                    "tie them as one parameter: module.weight = other.weight"
                )


def _check_devices(model: nn.Module, accelerator: Accelerator) -> None:
    device = accelerator.device
    allowed = {"cpu", "meta", device.type}
    there = "" if device.type == "cpu" else f" or to {device}"
    for name, p in model.named_parameters():
        if p.device.type not in allowed:
            raise ValueError(
                f"parameter {name!r} is on {p.device}; move the model to the CPU{there} before wrap"
            )


def _check_moments(optimizer: torch.optim.Optimizer, config: OffloadConfig) -> None:
    own = moments_of(optimizer)
    if own not in ("fp32", config.moments):
        raise ValueError(
            f"the optimizer stores its moments as {own!r}, but wrap was told {config.moments!r}; "
            f"pass moments={own!r} to wrap, or leave it out of the optimizer"
        )


def decide(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    accelerator: Accelerator, tokens: int = 0, machine: Machine | None = None,
    example: Callable[[], torch.Tensor] | None = None, prefer: Preference | None = None,
    every_update: bool = False, numel: int | None = None,
) -> Blueprint:  # fmt: skip
    """All that can be said before anything is allocated.

    Args:
        tokens, example: what a micro-step computes, see ``plan``.
        prefer: this placement instead of the best one.
        every_update: also foresee the other ways to update.
        numel: elements of a record of state, where a store has set it.
    """
    rules = rules_for(optimizer)
    _check_model(model, optimizer)
    _check_devices(model, accelerator)
    _check_moments(optimizer, config)
    groups = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    granule = max(granule_of(r.state_fields(torch.float32, None, config.moments)) for r in rules)
    parts = partition(model, groups, names=config.units, dtype=config.weight_dtype, granule=granule)
    if machine is None or machine.host_memory is None:
        budgets = resolve_budgets(
            config, accelerator.device if accelerator.has_device_memory else None
        )
    else:
        budgets = machine_budgets(config, machine)
    update = "next_forward" if config.update == "auto" else config.update
    durable = config.durable and config.nvme is not None
    needs = Needs(_fields_of(rules, config), config.accumulate, update, durable, numel=numel)
    trained = {c.dtype for u in parts.units for c in u.chunks if c.group is not None}
    if config.master == "split" and torch.bfloat16 not in trained:
        raise ValueError(
            f"master='split' is for bf16 weights; these are {', '.join(map(str, trained))}; pass "
            "precision='bf16' or leave master out"
        )
    profile = None if example is None else profile_step(model, parts, example)
    load = Load(tokens, profile)
    chosen = choose_plan(parts, budgets, needs, config.prefetch_depth, config.rates, load, prefer)
    others = _by_update(chosen, parts, budgets, config, load) if every_update else {}
    plan = _plan_of(chosen, parts, budgets, config, load, others)
    return Blueprint(config, parts, plan, budgets, rules, update)


def _plan_of(
    chosen: Chosen, parts: Partition, budgets: Budgets, config: OffloadConfig, load: Load,
    step_s_by_update: Mapping[str, float],
) -> Plan:  # fmt: skip
    """All that a plan says of what was chosen."""
    layout, needs, rates, profile = chosen.layout, chosen.needs, config.rates, load.profile
    fits, links, bound = not chosen.shortfalls, chosen.link_bytes, None
    if needs.durable and fits:
        commits = saved_bytes(layout) // config.commit_every
        links = {**links, "write": links.get("write", 0) + commits}
    if rates is not None and fits:
        bound = step_bound(
            layout, links, rates, update=needs.update, micro_steps=config.accumulate,
            tokens=load.tokens * config.accumulate,
            compute_s=None if profile is None else profile.compute_s * config.accumulate,
        )  # fmt: skip
    held = {
        Tier.DEVICE: layout.regions.device_bytes,
        Tier.HOST: layout.regions.host_bytes,
        Tier.NVME: chosen.disk_bytes,
    }
    detail = PlanDetail(
        layout=layout,
        simulated=chosen.simulated,
        update=needs.update,
        accumulate=config.accumulate,
        step_s_by_update=step_s_by_update,
        device_update_share=device_update_share(layout),
        device_update_worth=None if rates is None else device_update_worth(rates),
        preference=needs.prefer,
        activation_bytes=load.activation_bytes(parts),
        left_bytes=_left_bytes(budgets, held),
        profile=profile,
        budgets=budgets,
        rates=rates,
    )
    return Plan(
        fits=fits,
        shortfalls=chosen.shortfalls,
        placement={u.name: h for u, h in zip(parts.units, layout.homes, strict=True)},
        tier_bytes=held,
        link_bytes=links,
        disk_bytes=chosen.disk_bytes,
        step_s=_with_commits(chosen.step_s, bound, needs.durable) if rates is not None else None,
        bound_s=None if bound is None else bound.seconds,
        bottleneck=None if bound is None else bound.bottleneck,
        detail=detail,
    )


def _left_bytes(budgets: Budgets, held: Mapping[Tier, int]) -> int | None:
    """Memory that compute uses and the engine would not hold."""
    if budgets.compute_bytes is None:
        return None
    tier = Tier.HOST if budgets.device is None else Tier.DEVICE
    return max(0, budgets.compute_bytes - held[tier])


def _with_commits(step_s: float | None, bound: Bound | None, durable: bool) -> float | None:
    """The simulated step moves no commits, which go on behind it: they slow it only where the disk
    then is the slowest."""
    return max(step_s, bound.seconds) if durable and step_s and bound is not None else step_s


def foretell(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Mapping[str, Any], *,
    tokens: int = 0, machine: Machine | None = None, measure: bool = False,
    example: Callable[[], torch.Tensor] | None = None, prefer: Preference | None = None,
    every_update: bool = True,
) -> Plan:  # fmt: skip
    """What ``plan`` does; see there, and ``decide`` for the last two."""
    if machine is not None:
        options = {"rates": machine.rates, **options}
        if machine.host_memory is not None:
            options["device"] = "cpu" if machine.device_memory is None else "sim"
    config = OffloadConfig.from_options(options)
    accelerator = make_accelerator(config.device, config.rates)
    try:
        config, _ = calibrated(model, optimizer, config, accelerator, anew=measure)
        made = decide(
            model, optimizer, config, accelerator, tokens, machine, example, prefer, every_update
        ).plan
        if machine is not None:
            _refuse_unknown_rates(made, machine, computes=tokens > 0)
        return made
    finally:
        accelerator.close()


def _refuse_unknown_rates(plan: Plan, machine: Machine, *, computes: bool) -> None:
    """A lane without a rate would take no time: of a machine that is not here that would be a
    promise nobody made."""
    if plan.detail.layout is None or not plan.fits:
        return
    needed = {
        "disk_read_bytes_s": plan.link_bytes.get("read", 0),
        "disk_write_bytes_s": plan.link_bytes.get("write", 0),
        "h2d_bytes_s": plan.link_bytes.get("copy_in", 0),
        "d2h_bytes_s": plan.link_bytes.get("copy_out", 0),
        "update_params_s": trained_params(plan.detail.layout),
        "device_flops_s": computes,
    }
    missing = [rate for rate, used in needed.items() if used and not getattr(machine.rates, rate)]
    if missing:
        without = "" if missing != ["device_flops_s"] else ", or give --tokens 0 (tokens=0)"
        raise ValueError(
            f"rates of {machine.name}: {', '.join(missing)} not known, but this plan needs them; "
            f"add them to the machine's file{without}"
        )


def _by_update(
    chosen: Chosen, parts: Partition, budgets: Budgets, config: OffloadConfig, load: Load
) -> dict[str, float]:
    """Seconds of a step by the way to update, those that the options rule out left away."""
    if chosen.step_s is None or config.rates is None:
        return {}
    found = {chosen.needs.update: chosen.step_s}
    for other in ("step", "backward", "next_forward"):
        if other in found or (other == "backward" and config.max_grad_norm is not None):
            continue
        needs = replace(chosen.needs, update=other)
        step_s = foresee(parts, budgets, needs, config.rates, load).step_s
        if step_s is not None:
            found[other] = step_s
    return found


def calibrated(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    accelerator: Accelerator, *, anew: bool = False,
) -> tuple[OffloadConfig, Calibration | None]:  # fmt: skip
    """The options with rates: the user's own, else those of this machine, measured once.

    Raises:
        TypeError: no rule for the optimizer.
        IoError: a directory is missing or cannot be written.
    """
    if config.rates is not None:
        return config, None
    _check_model(model, optimizer)
    sizes = Counter[torch.dtype]()
    for p in model.parameters():
        sizes[config.weight_dtype or p.dtype] += p.numel()
    dtype = max(sizes, key=lambda each: sizes[each], default=torch.float32)
    update = case_of(rules_for(optimizer)[0], dtype, _master_of(dtype, config), config.moments)
    kept = calibrate(config.nvme or (), accelerator.name, Task(update, dtype), anew=anew)
    return replace(config, rates=kept.for_task(Task(update, dtype))), kept
