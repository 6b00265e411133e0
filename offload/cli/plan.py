"""``overspill plan``: what a run would hold, move and take, on this machine or another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..facts.machine import Machine
from ..train.shapes import DEFAULT_SHAPE
from . import options as opt
from .failures import REFUSED, one_line_errors
from .heap import nothing_collected
from .plan_text import plan_json, show_plan

if TYPE_CHECKING:
    from ..planning.plan import Plan

GIB = 1 << 30

MachineFile = Annotated[
    Path | None,
    typer.Option(
        "--rates",
        help="TOML or JSON of rates, and of a whole machine with its sizes; default: this "
        "machine, measured once.",
    ),
]
Tokens = Annotated[
    int, typer.Option(help="Tokens of one micro-batch, for compute; 0 leaves compute out.")
]


def plan(
    name: Annotated[
        str | None,
        typer.Argument(
            help="As --model: a folder, a config.json or a named shape.", metavar="MODEL"
        ),
    ] = None,
    model: opt.Model = DEFAULT_SHAPE,
    device: opt.Device = None,
    device_memory: opt.DeviceMemory = None,
    host_memory: opt.HostMemory = None,
    nvme: opt.Nvme = None,
    nvme_memory: opt.NvmeMemory = None,
    precision: opt.Precision = None,
    master: opt.Master = None,
    moments: opt.Moments = None,
    activations: opt.Activations = None,
    update: opt.Update = None,
    max_grad_norm: opt.MaxGradNorm = None,
    accumulate: opt.Accumulate = 1,
    units: opt.Units = None,
    resident: opt.Resident = None,
    prefetch_depth: opt.PrefetchDepth = None,
    rates: MachineFile = None,
    tokens: Tokens = 4096,
    durable: opt.NotDurable = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine anew; takes a few seconds.")
    ] = False,
    every_unit: Annotated[
        bool, typer.Option("--every-unit", help="Also list every unit and where it lives.")
    ] = False,
    endurance: Annotated[
        str | None, typer.Option(help="What may be written to the disks over their lives: 600TB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated steps: Chrome trace JSON, or .png.")
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Show whether a model fits, what goes where, and how long a step takes.  Allocates nothing."""
    with one_line_errors(debug), nothing_collected():
        from ..observe.export import save_trace
        from ..train.shapes import plan_model

        machine = None if rates is None else Machine.from_file(rates)
        options = opt.wrap_options(
            device=device, device_memory=device_memory, host_memory=host_memory, nvme=nvme,
            nvme_memory=nvme_memory, precision=precision, master=master, moments=moments,
            activations=activations,
            update=update, max_grad_norm=max_grad_norm, units=units, resident=resident,
            accumulate=accumulate, prefetch_depth=prefetch_depth, rates=None, durable=durable,
        )  # fmt: skip
        if endurance is None and machine is not None:
            endurance = machine.endurance
        make = _planner(plan_model(name or model), options)
        made = make(machine, tokens, {"measure": measure})
        gains = _gains(make, made, machine, tokens)
        if trace is not None and made.detail.simulated is not None:
            save_trace(made.detail.simulated.trace, trace)
    total = tokens * accumulate
    if as_json:
        print(json.dumps(plan_json(made, total, gains, machine, endurance), indent=2))
    else:
        show_plan(made, total, gains, machine, endurance, every_unit=every_unit)
    if made.detail.activations_fit is False:
        raise typer.Exit(TOO_MANY_ACTIVATIONS)
    if not made.fits:
        raise typer.Exit(REFUSED)


TOO_MANY_ACTIVATIONS = 3  # all else fits
HOW = ("measure", "prefer", "every_update")  # what is no option of ``wrap``
Make = Callable[[Machine | None, int, dict[str, Any]], "Plan"]


def _planner(model: Any, options: dict[str, Any]) -> Make:
    from ..plans import make_plan
    from ..train.head import has_chunked_loss
    from ..train.skeletons import skeleton_adamw

    optimizer = skeleton_adamw(model)

    def make(machine: Machine | None, tokens: int, more: dict[str, Any]) -> Plan:
        given = {**options, "tokens": tokens, **more}
        how = {name: given.pop(name) for name in HOW if name in given}
        return make_plan(
            model, optimizer, given, machine=machine, logits=not has_chunked_loss(), **how,
        )  # fmt: skip

    return make


def _gains(make: Make, made: Plan, machine: Machine | None, tokens: int) -> dict[str, float]:
    """Step times, in seconds, of the same plan with a little more of something."""
    if made.step_s is None or made.detail.layout is None or made.detail.budgets is None:
        return {}
    fixed: dict[str, Any] = {
        "prefetch_depth": made.detail.layout.prefetch_depth, "prefer": made.detail.preference,
        "every_update": False,
    }  # fmt: skip
    gains: dict[str, float] = {}

    def keep(name: str, other: Plan) -> None:
        if other.step_s is not None:
            gains[name] = other.step_s

    more_host = {**fixed, "host_memory": made.detail.budgets.host + GIB}
    keep("one GiB more of host memory", make(machine, tokens, more_host))
    if machine is not None and machine.rates.disk_read_bytes_s and made.disk_bytes:
        keep("one more disk", make(_with_disk(machine), tokens, fixed))
    if tokens:
        keep("twice the tokens", make(machine, 2 * tokens, fixed))
    return gains


def _with_disk(machine: Machine) -> Machine:
    share, rates = (machine.disks + 1) / machine.disks, machine.rates

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * share

    faster = replace(
        rates,
        disk_read_bytes_s=scaled(rates.disk_read_bytes_s),
        disk_write_bytes_s=scaled(rates.disk_write_bytes_s),
        disk_both_bytes_s=scaled(rates.disk_both_bytes_s),
    )
    return replace(machine, rates=faster, disks=machine.disks + 1)
