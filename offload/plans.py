"""Plans of a run, and the rates of the machine that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .blueprints import make_blueprint, master_of, updates_of
from .checks import check_model
from .closeable import end_unused
from .config import OffloadConfig
from .facts.machine import Machine
from .measure.calibration import Calibration, Task, calibrate
from .measure.machine_rates import measure_file
from .movement.accelerators.make import Accelerator, make_accelerator
from .optim import Rule
from .optim.bench import Case, case_of
from .optim.registry import rules_for
from .optim.rule import is_whole
from .optim.untrained import NoOptimizer
from .planning.bounds import (
    updated_on_device,
)
from .planning.budgets import require_directories
from .planning.plan import Plan, Preference
from .private import buffers_private


def make_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any], *,
    machine: Machine | None = None, measure: bool = False,
    example: Callable[[], torch.Tensor] | None = None, prefer: Preference | None = None,
    every_update: bool = True, unless_short: bool = False,
) -> Plan:  # fmt: skip
    """Implement ``plan``; for the last four arguments see ``make_blueprint``."""
    config = OffloadConfig.from_options(options_for(machine, options))
    end_unused()
    if optimizer is None:
        if example is not None:
            raise ValueError("example= runs a backward; without an optimizer give tokens=")
        optimizer, config, every_update = NoOptimizer(), config.for_inference(), False
    accelerator, promoted = make_accelerator(config.device, config.rates), list[nn.Module]()
    try:
        buffers_private.promote(model, promoted)
        config, _ = calibrated(model, optimizer, config, accelerator, remeasure=measure)
        made = make_blueprint(
            model, optimizer, config, accelerator, machine, example, prefer, every_update,
            unless_short=unless_short,
        ).plan  # fmt: skip
        if machine is not None:
            _refuse_unknown_rates(made, machine, computes=config.tokens > 0)
        return made
    finally:
        accelerator.close()
        buffers_private.demote(promoted)


def options_for(machine: Machine | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the rates of ``machine``, and a device like its own."""
    found = dict(options)
    if machine is not None:
        found = {"rates": machine.rates, **found}
        if machine.host_memory is not None:
            found["device"] = "cpu" if machine.device_memory is None else "sim"
    return found


def _measured_case(
    rules: Sequence[Rule], optimizer: torch.optim.Optimizer, dtype: torch.dtype,
    config: OffloadConfig,
) -> Case | None:  # fmt: skip
    """Return the case as which the update is measured: that of the rule with the most parameters,
    among the rules that run in kernels; ``None`` if there are none."""
    numel = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    for _, rule in sorted(zip(numel, rules, strict=True), key=lambda each: -each[0]):
        if not is_whole(rule):
            case = case_of(rule, dtype, master_of(dtype, config), config.moments)
            if case is not None:
                return case
    return None


def _refuse_unknown_rates(plan: Plan, machine: Machine, *, computes: bool) -> None:
    """Raise ``ValueError`` if the plan of another machine uses a lane whose rate is unknown.

    Such a lane would take no time, so the plan would promise too much.
    """
    if plan.detail.layout is None or not plan.fits:
        return
    records, there = plan.detail.layout.records, updated_on_device(plan.detail.layout)
    needed = {
        "disk_read_bytes_s": plan.link_bytes.get("read", 0),
        "disk_write_bytes_s": plan.link_bytes.get("write", 0),
        "h2d_bytes_s": plan.link_bytes.get("copy_in", 0),
        "d2h_bytes_s": plan.link_bytes.get("copy_out", 0),
        "update_params_s": sum(s.count for s in records if not s.moved_bytes),
        "wire_bytes_s": plan.link_bytes.get("wire", 0),
        "dram_bytes_s": any(s.moved_bytes and s.index not in there for s in records),
        "host_flops_s": any(s.flops and s.index not in there for s in records),
        "device_flops_s": computes or any(s.flops and s.index in there for s in records),
    }
    missing = [rate for rate, used in needed.items() if used and not getattr(machine.rates, rate)]
    if missing:
        without = "" if missing != ["device_flops_s"] else ", or give --tokens 0 (tokens=0)"
        raise ValueError(
            f"rates of {machine.name}: {', '.join(missing)} not known, but this plan needs them; "
            f"add them to the machine's file{without}"
        )


def calibrated(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    accelerator: Accelerator, *, remeasure: bool = False,
) -> tuple[OffloadConfig, Calibration | None]:  # fmt: skip
    """Return the options with rates: the user's, else those of this machine, measured once.

    Raises:
        TypeError: there is no rule for the optimizer.
        IoError: a directory is missing or cannot be written.
    """
    if config.rates is not None:
        return config, None
    check_model(model, optimizer, config.weight_dtype)
    require_directories(config.nvme or ())
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sizes = Counter[torch.dtype]()
    for p in model.parameters():
        if p.is_complex():
            sizes[p.dtype.to_real()] += 2 * p.numel()
        elif p.is_floating_point() and (id(p) in trained or not trained):
            sizes[config.weight_dtype or p.dtype] += p.numel()
    dtype = max(sizes, key=lambda each: sizes[each], default=torch.float32)
    rules = rules_for(optimizer)
    products = updates_of(rules, optimizer, config).products(config.weight_dtype)
    task = Task(_measured_case(rules, optimizer, dtype, config), dtype, products)
    kept = calibrate(config.nvme or (), accelerator.name, task, remeasure=remeasure)
    rates = kept.for_task(task)
    if rates.disk_read_bytes_s is None and (first := config.first_weights) is not None:
        rates = replace(rates, disk_read_bytes_s=measure_file(first))
    return replace(config, rates=rates), kept
