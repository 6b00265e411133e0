"""``overspill plan``: what a run would hold and move, without doing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ..train.shapes import DEFAULT_SHAPE
from . import options as opt
from .failures import REFUSED, one_line_errors

if TYPE_CHECKING:
    from ..schedule.plan import Plan


def plan(
    model: opt.Model = DEFAULT_SHAPE,
    device: opt.Device = None,
    device_memory: opt.DeviceMemory = None,
    host_memory: opt.HostMemory = None,
    nvme: opt.Nvme = None,
    nvme_memory: opt.NvmeMemory = None,
    precision: opt.Precision = None,
    master: opt.Master = None,
    moments: opt.Moments = None,
    update: opt.Update = None,
    max_grad_norm: opt.MaxGradNorm = None,
    accumulate: opt.Accumulate = 1,
    units: opt.Units = None,
    prefetch_depth: opt.PrefetchDepth = None,
    rates: opt.RatesFile = None,
    durable: opt.NotDurable = None,
    debug: opt.Debug = False,
) -> None:
    """Show whether a model fits, what goes where, and what a step moves.  Allocates nothing."""
    import torch

    from ..optimizer import plan as make_plan
    from ..train.shapes import find_model

    with one_line_errors(debug):
        built = find_model(model).build()
        optimizer = torch.optim.AdamW(built.parameters())
        options = opt.wrap_options(
            device=device, device_memory=device_memory, host_memory=host_memory, nvme=nvme,
            nvme_memory=nvme_memory, precision=precision, master=master, moments=moments,
            update=update, max_grad_norm=max_grad_norm, units=units,
            prefetch_depth=prefetch_depth, rates=rates, durable=durable,
        )  # fmt: skip
        made = make_plan(built, optimizer, accumulate=accumulate, **options)
    _show(made)
    if not made.fits:
        raise typer.Exit(REFUSED)


def _show(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..errors import format_bytes

    console = Console()
    if plan.layout is not None:
        table = Table("unit", "parameters", "weights", "gradients", "optimizer state")
        for unit, home in zip(plan.layout.units, plan.placement.values(), strict=True):
            states = sorted({tier.value for tier in home.state})
            table.add_row(
                unit.name or "(the model itself)",
                f"{sum(chunk.numel for chunk in unit.chunks):,}",
                home.weights.value,
                "not kept" if home.grads is None else home.grads.value,
                " and ".join(states) or "none",
            )
        console.print(table)
    for tier, nbytes in plan.tier_bytes.items():
        console.print(f"holds in {tier.value:7} {format_bytes(nbytes)}")
    for lane, nbytes in plan.link_bytes.items():
        console.print(f"moves per step, {lane:8} {format_bytes(nbytes)}")
    if plan.bound_s is not None:
        console.print(
            f"a step takes at least {plan.bound_s:.3g} s to move this ({plan.bottleneck})"
        )
    for shortfall in plan.shortfalls:
        console.print(f"does not fit: {shortfall}", soft_wrap=True)
    if plan.fits:
        console.print("fits")
