"""A plan as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import parse_size
from ..errors import format_bytes
from ..facts.tier import Tier
from ..observe.page import MORE_TOKENS

if TYPE_CHECKING:
    from rich.table import Table

    from ..facts.machine import Machine
    from ..planning.plan import Plan
    from ..train.choices import Choice

WIDTH = 100
DAY_S = 86400.0


def contents(plan: Plan) -> dict[Tier, Counter[str]]:
    """What lives in each tier: bytes by kind."""
    found: dict[Tier, Counter[str]] = {tier: Counter() for tier in Tier}
    layout = plan.detail.layout
    if layout is None:
        return found
    for unit, home, group, grads in zip(
        layout.units, layout.homes, layout.subgroups, layout.grad_bytes, strict=True
    ):
        there = home.weights is Tier.DEVICE
        if there or home.weights is Tier.NVME or not home.page_on_device:
            found[home.weights]["weights"] += unit.weight_bytes if there else unit.stored_bytes
        if home.page_on_device:
            found[Tier.DEVICE]["weights"] += unit.stored_bytes
        if home.resident and layout.has_device and home.weights is not Tier.DEVICE:
            found[Tier.DEVICE]["weights"] += unit.weight_bytes
        if home.grads is not None:
            found[home.grads]["gradients"] += grads
        for tier, subgroup in zip(home.state, group, strict=True):
            found[tier]["optimizer state"] += subgroup.nbytes
    regions = layout.regions
    found[Tier.DEVICE]["room to stream"] += regions.device_bytes - regions.device_fixed
    for tier, mine in ((Tier.DEVICE, regions.device_bytes), (Tier.HOST, regions.host_bytes)):
        found[tier]["working memory"] += plan.tier_bytes[tier] - mine
    state = regions.state_slot * regions.state_slots
    found[Tier.HOST]["room to stream"] += regions.host_weights + regions.host_grads + state
    return found


def endurance_days(plan: Plan, endurance: str | None) -> float | None:
    """Days of training that the disks' endurance lasts, or ``None`` where it is not known."""
    written = plan.link_bytes.get("write", 0)
    if endurance is None or not written or not plan.step_s:
        return None
    size = parse_size(endurance, "endurance").nbytes
    return None if size is None else size / written * plan.step_s / DAY_S


def plan_json(
    plan: Plan,
    tokens: int,
    gains: Mapping[str, float],
    machine: Machine | None,
    endurance: str | None = None,
) -> dict[str, Any]:
    """All figures as plain values; bytes and seconds."""
    stats = None if plan.detail.simulated is None else plan.detail.simulated.stats
    return {
        "machine": None if machine is None else machine.name,
        "fits": plan.fits,
        "shortfalls": [
            {"tier": s.tier.value, "what": s.what, "need_bytes": s.need_bytes,
             "have_bytes": s.have_bytes, "remedy": s.remedy} for s in plan.shortfalls
        ],
        "fitting": dict(plan.detail.fitting),
        "tier_bytes": {tier.value: nbytes for tier, nbytes in plan.tier_bytes.items()},
        "contents": {t.value: dict(kinds) for t, kinds in contents(plan).items()},
        "link_bytes": dict(plan.link_bytes),
        "disk_bytes": plan.disk_bytes,
        "tokens": tokens,
        "step_s": plan.step_s,
        "tokens_s": _tokens_s(plan, tokens),
        "bound_s": plan.bound_s,
        "bottleneck": plan.bottleneck,
        "update": plan.detail.update,
        "step_s_by_update": dict(plan.detail.step_s_by_update),
        "device_update_share": plan.detail.device_update_share,
        "device_update_worth": plan.detail.device_update_worth,
        "resident_share": _resident_share(plan),
        "activation_bytes": plan.detail.activation_bytes,
        "activations_fit": plan.detail.activations_fit,
        "stall_s": {} if stats is None else {k: v.stall_s for k, v in stats.lanes.items()},
        "pageable_bytes": plan.detail.pageable_bytes,
        "prefetch_depth": None if plan.detail.layout is None else plan.detail.layout.prefetch_depth,
        "step_s_with": dict(gains),
        "endurance_days": endurance_days(plan, endurance),
    }  # fmt: skip


def show_plan(
    plan: Plan,
    tokens: int,
    gains: Mapping[str, float],
    machine: Machine | None,
    endurance: str | None = None,
    *,
    every_unit: bool = False,
) -> None:
    """Prints a plan for people."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if machine is not None:
        console.print(f"on {machine.name}", highlight=False)
    if plan.detail.layout is not None:
        params = sum(c.numel for u in plan.detail.layout.units for c in u.chunks)
        console.print(
            f"{params:,} parameters in {len(plan.detail.layout.units)} units", highlight=False
        )
    if every_unit:
        console.print(_units(plan))
    console.print(_tiers(plan))
    if plan.link_bytes:
        moved = ", ".join(f"{lane} {format_bytes(n)}" for lane, n in plan.link_bytes.items())
        console.print(f"a step moves: {moved}", highlight=False, soft_wrap=True)
    for line in _times(plan, tokens, gains, endurance):
        console.print(line, highlight=False, soft_wrap=True)
    for shortfall in plan.shortfalls:
        console.print(f"does not fit: {shortfall}", soft_wrap=True)
    if plan.detail.fitting:
        flags = (f"--{k.replace('_', '-')} {size}" for k, size in plan.detail.fitting.items())
        told = f"budgets that would fit: {' '.join(flags)}"
        console.print(told, highlight=False, soft_wrap=True)
    if plan.fits:
        console.print(verdict(plan, tokens), highlight=False, soft_wrap=True)
    elif plan.detail.activation_bytes is not None:
        console.print(plan.detail.about_activations, highlight=False, soft_wrap=True)


def verdict(plan: Plan, tokens: int) -> str:
    """Whether it fits, and what that counts, in one line."""
    more = "" if tokens else " (--tokens tells how much they take)"
    return f"fits, {plan.detail.about_streaming}{plan.detail.about_activations}{more}"


def _units(plan: Plan) -> Table:
    from rich.table import Table

    table = Table("unit", "parameters", "weights", "gradients", "optimizer state")
    units = () if plan.detail.layout is None else plan.detail.layout.units
    for unit, home in zip(units, plan.placement.values(), strict=True):
        stays = (
            "resident" if home.resident else "packed on the device" if home.page_on_device else ""
        )
        weights = ", ".join(filter(None, (home.weights.value, stays)))
        grads = "not kept" if home.grads is None else home.grads.value
        states = " and ".join(sorted({tier.value for tier in home.state})) or "none"
        numel = sum(chunk.numel for chunk in unit.chunks)
        table.add_row(unit.name or "(the model itself)", f"{numel:,}", weights, grads, states)
    return table


def _tiers(plan: Plan) -> Table:
    from rich.table import Table

    table = Table("tier", "held", "of which")
    for tier, kinds in contents(plan).items():
        held = plan.tier_bytes.get(tier, 0)
        if held:
            parts = [f"{kind} {format_bytes(n)}" for kind, n in kinds.items() if n]
            if tier is Tier.NVME and plan.detail.layout is not None and plan.detail.layout.durable:
                parts.append("twice, for a safe step")
            table.add_row(tier.value, format_bytes(held), ", ".join(parts))
    return table


def _times(plan: Plan, tokens: int, gains: Mapping[str, float], endurance: str | None) -> list[str]:
    if plan.step_s is None or plan.bound_s is None:
        return []
    speed = f", {tokens / plan.step_s:,.0f} tokens/s" if tokens and plan.step_s else ""
    lines = [
        f"a step takes {plan.step_s:.3g} s{speed}"
        + ("" if tokens else ", compute left out")
        + f"; at least {plan.bound_s:.3g} s ({plan.bottleneck or 'nothing to move'})"
    ]
    if plan.detail.simulated is not None:
        lanes = plan.detail.simulated.stats.lanes.items()
        waits = [f"{name} {lane.stall_s:.3g} s" for name, lane in lanes if lane.stall_s > 0]
        lines.append(f"compute waits for: {', '.join(waits) or 'nothing'}")
    lines.extend(_updates(plan))
    for what, step_s in gains.items():
        per_token = 2 if what == MORE_TOKENS else 1
        change = step_s / per_token / plan.step_s - 1 if plan.step_s else 0.0
        told = f"{change:+.0%} time per token" if abs(change) >= 0.005 else "a token takes as long"
        lines.append(f"with {what}: {step_s:.3g} s a step ({told})")
    written = plan.link_bytes.get("write", 0)
    if written:
        days = endurance_days(plan, endurance)
        worn = "" if days is None else f"; the disks' endurance lasts {days:,.1f} days of training"
        lines.append(f"writes {format_bytes(written)} a step{worn}")
    return lines


def _updates(plan: Plan) -> list[str]:
    """What the recipes to update take, and where updates run."""
    if plan.step_s is None:
        return []
    lines = []
    others = {k: v for k, v in plan.detail.step_s_by_update.items() if k != plan.detail.update}
    if others:
        times = ", ".join(f"{mode} {seconds:.3g} s" for mode, seconds in others.items())
        line = f"updates in mode {plan.detail.update}; with other modes: {times}"
        backward_s = others.get("backward", plan.step_s)
        if backward_s < 0.98 * plan.step_s:
            line += (
                "; --update backward is for loops that leave gradients alone between backward() "
                "and step()"
            )
        lines.append(line)
    if plan.detail.layout is not None and plan.detail.layout.has_device:
        line = f"on the device: {plan.detail.device_update_share:.0%} of the update"
        if plan.detail.layout.visiting or plan.detail.layout.matrices_visit:
            line += ", part of it of state that goes there for it and comes back"
        lines.append(f"{line}; {_resident_share(plan):.0%} of the weights stay")
    return lines


def _resident_share(plan: Plan) -> float:
    """Share of the weights that compute finds in place, step after step."""
    layout = plan.detail.layout
    total = 0 if layout is None else sum(unit.weight_bytes for unit in layout.units)
    if layout is None or not total:
        return 0.0
    pairs = zip(layout.units, layout.homes, strict=True)
    return sum(unit.weight_bytes for unit, home in pairs if home.resident) / total


def choices_json(choices: Sequence[Choice], tokens: int) -> list[dict[str, Any]]:
    """Ways to train as plain values; bytes and seconds."""
    return [
        {
            "recipe": each.recipe.name,
            "options": dict(each.recipe.options),
            "lora_rank": each.recipe.lora_rank,
            "least": each.least,
            "fits": each.plan.fits,
            "host_budget_bytes": _host_budget(each.plan),
            "tier_bytes": {tier.value: nbytes for tier, nbytes in each.plan.tier_bytes.items()},
            "step_s": each.plan.step_s,
            "tokens_s": _tokens_s(each.plan, tokens),
        }
        for each in choices
    ]


def show_choices(choices: Sequence[Choice], tokens: int) -> None:
    """Prints recipes to train as a table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table("what is trained", "host budget", "device", "disk", "a step", "tokens/s")
    for each in choices:
        plan = each.plan
        disk, on_device = plan.tier_bytes.get(Tier.NVME, 0), plan.detail.layout
        there = on_device is not None and on_device.has_device
        device = plan.tier_bytes.get(Tier.DEVICE, 0) if there else 0
        budget = format_bytes(_host_budget(plan) or 0)
        if not plan.fits:
            table.add_row(each.recipe.name, budget, "-", "-", "no room", "-")
            continue
        speed = _tokens_s(plan, tokens)
        table.add_row(
            each.recipe.name, f"{budget}, the least" if each.least else budget,
            format_bytes(device) if device else "-", format_bytes(disk) if disk else "-",
            "?" if plan.step_s is None else f"{plan.step_s:.3g} s",
            "?" if speed is None else f"{speed:,.0f}",
        )  # fmt: skip
    console.print(table)
    for each in choices:
        for short in each.plan.shortfalls:
            told = f"{each.recipe.name}: no room: {short}"
            console.print(told, highlight=False, soft_wrap=True)
    rows = [each for each in choices if each.recipe.options or each.recipe.lora_rank]
    words = {each.recipe.name: _flags(each) for each in rows if each.plan.fits}
    if words:
        console.print("in words of overspill plan (a script has peft's LoRA, and wrap's frozen=):")
    for name, flags in words.items():
        console.print(f"{name}: {flags}", highlight=False, soft_wrap=True)


def _flags(choice: Choice) -> str:
    options = choice.recipe.options.items()  # plan takes the weights of a quantised folder
    flags = [f"--{name} {value}" for name, value in options if name != "weights"]
    rank = choice.recipe.lora_rank
    return " ".join(flags + ([] if rank is None else [f"--lora-rank {rank}"]))


def _host_budget(plan: Plan) -> int | None:
    return None if plan.detail.budgets is None else plan.detail.budgets.host


def _tokens_s(plan: Plan, tokens: int) -> float | None:
    return tokens / plan.step_s if plan.step_s and tokens else None
