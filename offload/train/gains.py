"""What a step would take with a little more of something, or in another way: planned again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..facts.machine import Machine
from ..facts.rates import Rates
from ..facts.trace import Trace
from ..logits.heads import defer_logits
from ..observe.page import MORE_TOKENS
from ..over_ranks import plan_for
from ..planning.bounds import step_flops
from ..planning.costs import Profile
from ..planning.plan import Plan
from .skeletons import skeleton_optimizer

GIB = 1 << 30
MORE_HOST, MORE_DISKS = "one GiB more of host memory", "one more disk"
LARGER_BATCH = "twice the micro-batch and half the accumulation"
HOW = ("measure", "prefer", "every_update", "unless_short")  # what is no option of ``wrap``
Make = Callable[[Machine | None, int, dict[str, Any]], Plan]


def planner(
    model: nn.Module, options: Mapping[str, Any], optimizer: str = "adamw", ranks: int = 1
) -> Make:
    """What plans a model without weights, by a machine (``None``: this one), tokens of a
    micro-step, and other options or ways to plan.

    Args:
        optimizer: see ``skeleton_optimizer``; ``overspill train`` has AdamW.
        ranks: that train it together under FSDP2; see ``plan``.

    Raises:
        ValueError, BudgetError: as ``plan`` does.
    """
    trained_with = skeleton_optimizer(model, optimizer)
    defer_logits(model)

    def make(machine: Machine | None, tokens: int, more: dict[str, Any]) -> Plan:
        given = {"tile": "auto", **options, "tokens": tokens, **more}
        how = {name: given.pop(name) for name in HOW if name in given}
        return plan_for(model, trained_with, given, ranks, machine=machine, **how)

    return make


def gains(
    make: Make, made: Plan, machine: Machine | None, tokens: int, disks: int, ranks: int = 1
) -> dict[str, float]:
    """Step times, in seconds, of the same plan with a little more of something; ``disks`` and
    ``ranks``: that the plan is for.  With several ranks only larger batches are tried."""
    detail = made.detail
    if made.step_s is None or detail.layout is None or detail.budgets is None:
        return {}
    fixed: dict[str, Any] = {
        "prefetch_depth": detail.layout.prefetch_depth, "prefer": detail.preference,
        "every_update": False,
    }  # fmt: skip
    found: dict[str, float] = {}

    def keep(name: str, other: Plan) -> None:
        if other.step_s is not None:
            found[name] = other.step_s

    if ranks == 1:
        keep(MORE_HOST, make(machine, tokens, {**fixed, "host_memory": detail.budgets.host + GIB}))
    if (
        ranks == 1
        and detail.rates is not None
        and detail.rates.disk_read_bytes_s
        and made.disk_bytes
    ):
        rates = _with_disk(detail.rates, disks)
        if machine is None:
            keep(MORE_DISKS, make(None, tokens, {**fixed, "rates": rates}))
        else:
            keep(MORE_DISKS, make(replace(machine, rates=rates, disks=disks + 1), tokens, fixed))
    if tokens:
        keep(MORE_TOKENS, make(machine, 2 * tokens, fixed))
        if detail.accumulate % 2 == 0:
            fewer = {**fixed, "accumulate": detail.accumulate // 2}
            keep(LARGER_BATCH, make(machine, 2 * tokens, fewer))
    return found


def _with_disk(rates: Rates, disks: int) -> Rates:
    share = (disks + 1) / disks

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * share

    return replace(
        rates,
        disk_read_bytes_s=scaled(rates.disk_read_bytes_s),
        disk_write_bytes_s=scaled(rates.disk_write_bytes_s),
        disk_both_bytes_s=scaled(rates.disk_both_bytes_s),
    )


def after_a_run(
    model: nn.Module, options: Mapping[str, Any], run: Plan, trace: Trace, tokens: int
) -> dict[str, Any]:
    """What is worth trying next, with compute as a run has measured it.

    Args:
        model: without weights.
        options: of ``wrap``, as the run had them.
        run: its plan.
        tokens: of a micro-step.

    Returns:
        ``step_s`` as planned for the run itself, and ``with``: step times by what is changed; empty
        where nothing is known of compute.
    """
    compute_s = Profile.from_trace(trace, run.detail.accumulate).compute_s
    if run.detail.rates is None or run.detail.layout is None or not compute_s:
        return {}
    flops = step_flops(run.detail.layout.units, tokens)
    rates = replace(run.detail.rates, device_flops_s=flops / compute_s)
    given = {name: value for name, value in options.items() if name not in ("weights", "extra")}
    make = planner(model, {**given, "rates": rates})
    made = make(None, tokens, {})
    disks = len(given["nvme"]) if isinstance(given.get("nvme"), (list, tuple)) else 1
    found = gains(make, made, None, tokens, disks)
    if given.get("moments") in (None, "fp32"):
        other = make(None, tokens, {"moments": "int8", "every_update": False})
        if other.step_s is not None:
            found["moments='int8'"] = other.step_s
    for update, step_s in made.detail.step_s_by_update.items():
        if update != made.detail.update:
            found[f"update='{update}'"] = step_s
    return {"step_s": made.step_s, "with": found}
