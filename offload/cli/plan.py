"""``overspill plan``: what a run would hold, move and take, on this machine or another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..facts.machine import Machine
from ..train.shapes import DEFAULT_SHAPE
from . import options as opt
from .failures import REFUSED, one_line_errors
from .heap import nothing_collected
from .plan_text import choices_json, plan_json, show_choices, show_plan

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..train.choices import Choice

TOKENS = 4096
MachineFile = Annotated[
    Path | None,
    typer.Option(
        "--rates",
        help="TOML or JSON of rates, and of a whole machine with its sizes; default: this "
        "machine, measured once.",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of one micro-batch, for compute and activations; 0 leaves both out.  "
        f"Default: --seq times --batch, else {TOKENS}.",
    ),
]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of one sequence.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences of one micro-batch.")]
Anew = Annotated[
    bool, typer.Option("--measure", help="Measure this machine again; takes a few seconds.")
]
EveryUnit = Annotated[
    bool, typer.Option("--every-unit", help="Also list every unit and where it lives.")
]
Endurance = Annotated[
    str | None, typer.Option(help="What may be written to the disks over their lives: 600TB.")
]
AsRecompute = Annotated[bool, typer.Option("--recompute", help="As --activations recompute.")]
EveryWay = Annotated[
    bool,
    typer.Option(
        "--options",
        help="A table instead: all parameters, int8 moments, LoRA, packed bases, each with the "
        "budgets given and with the least host memory.",
    ),
]
Largest = Annotated[bool, typer.Option("--largest", help="Take the largest named shape that fits.")]
Ranks = Annotated[
    int,
    typer.Option(
        min=1,
        help="Ranks on this machine that train it together under FSDP2, each with a device; "
        "--tokens and --batch are those of one.",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="adamw, or muon: Muon for the matrices of the layers, and AdamW for the rest."
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(min=1, help="Train LoRA of this rank beside all matrices, the base frozen."),
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
    frozen: opt.Frozen = None,
    lora_rank: LoraRank = None,
    optimizer: Optimizer = "adamw",
    activations: opt.Activations = None,
    activations_format: opt.ActivationsFormat = None,
    recompute: AsRecompute = False,
    update: opt.Update = None,
    max_grad_norm: opt.MaxGradNorm = None,
    accumulate: opt.Accumulate = 1,
    units: opt.Units = None,
    resident: opt.Resident = None,
    prefetch_depth: opt.PrefetchDepth = None,
    rates: MachineFile = None,
    tokens: Tokens = None,
    seq: Seq = None,
    batch: Batch = None,
    ranks: Ranks = 1,
    durable: opt.NotDurable = None,
    commit_every: opt.CommitEvery = None,
    measure: Anew = False,
    every_unit: EveryUnit = False,
    endurance: Endurance = None,
    every_way: EveryWay = False,
    find_largest: Largest = False,
    as_json: opt.AsJson = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated steps: Chrome trace JSON, or .png.")
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Show whether a model fits, what goes where, and how long a step takes.  Allocates nothing."""
    with one_line_errors(debug), nothing_collected():
        from ..train.choices import LORA_RANK, choices

        _refuse_together(locals())
        machine = None if rates is None else Machine.from_file(rates)
        options = opt.wrap_options(
            device=device, device_memory=device_memory, host_memory=host_memory, nvme=nvme,
            nvme_memory=nvme_memory, precision=precision, master=master, moments=moments,
            activations="recompute" if recompute else activations, frozen=frozen, update=update,
            activations_format=activations_format, max_grad_norm=max_grad_norm, units=units,
            resident=resident, accumulate=accumulate,
            prefetch_depth=prefetch_depth, rates=None, durable=durable, commit_every=commit_every,
        )  # fmt: skip
        asked = _Asked(
            name or model, options, machine, _micro_batch(tokens, seq, batch), seq, accumulate,
            as_json, ranks,
        )  # fmt: skip
        if find_largest:
            asked = asked.with_largest(lora_rank)
        if every_way:
            found = choices(
                asked.name, options, machine, asked.tokens, lora_rank or LORA_RANK, asked.seq,
                ranks,
            )  # fmt: skip
        else:
            made, more = asked.plan(lora_rank, optimizer, trace, measure=measure)
    if every_way:
        _tell_choices(asked, found)
    else:
        endurance = endurance or (None if machine is None else machine.endurance)
        _tell_plan(asked, made, more, endurance, every_unit=every_unit)


TOO_MANY_ACTIVATIONS = 3  # all else fits


def _refuse_together(given: Mapping[str, Any]) -> None:
    """Raises for options that say different things."""
    if given["recompute"] and given["activations"] not in (None, "recompute"):
        raise ValueError(f"--recompute and --activations {given['activations']} differ; give one")
    if given["name"] is not None and given["model"] not in (DEFAULT_SHAPE, given["name"]):
        raise ValueError(f"MODEL is {given['name']} and --model {given['model']}; give one")
    if given["find_largest"] and (given["name"] is not None or given["model"] != DEFAULT_SHAPE):
        raise ValueError("--largest looks for a model; leave MODEL out")
    if given["optimizer"] != "adamw" and (given["every_way"] or given["find_largest"]):
        raise ValueError("--options and --largest are for AdamW; leave --optimizer out")
    if given["every_way"]:
        tried = [name for name in ("frozen", "moments") if given[name] is not None]
        if tried:
            raise ValueError(f"--options tries all values of --{tried[0]}; leave it out")
        alone = ("trace", "every_unit", "endurance", "measure")
        if any(given[name] for name in alone):
            raise ValueError(
                "--options is a table; --trace, --every-unit, --endurance and --measure are of one "
                "plan"
            )


def _micro_batch(tokens: int | None, seq: int | None, batch: int | None) -> int:
    """Tokens of a micro-batch."""
    if seq is None and batch is None:
        return TOKENS if tokens is None else tokens
    if tokens is not None:
        raise ValueError("give --tokens, or --seq and --batch, not both")
    if seq is None:
        raise ValueError("--batch is a number of sequences; say how long they are with --seq")
    return seq * (batch or 1)


@dataclass(frozen=True)
class _Asked:
    """What a plan is asked for; ``tokens`` are those of a micro-batch, ``seq`` of a sequence."""

    name: str
    options: Mapping[str, Any]
    target: Machine | None
    tokens: int
    seq: int | None
    accumulate: int
    as_json: bool
    ranks: int

    @property
    def step_tokens(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulate * self.ranks

    def with_largest(self, lora_rank: int | None) -> _Asked:
        """The same for the largest named shape that fits."""
        from ..train.choices import largest

        name, found = largest(
            self.options, self.target, self.tokens, lora_rank, self.seq, self.ranks
        )
        what = "the largest named shape that fits" if found.fits else "not even the smallest fits"
        typer.echo(f"{what}: {name}", err=self.as_json)
        return replace(self, name=name)

    def plan(
        self, lora_rank: int | None, optimizer: str, trace: Path | None, *, measure: bool
    ) -> tuple[Plan, dict[str, float]]:
        """The plan, and what more of something would gain."""
        from ..observe.trace_files import save_trace
        from ..train.choices import model_for
        from ..train.gains import gains, planner
        from ..train.shapes import quantised_by

        frozen, options = self.options.get("frozen"), self.options
        model = model_for(self.name, lora_rank, frozen, self.seq)
        if lora_rank is not None and frozen is None and quantised_by(self.name) is not None:
            options = {**options, "weights": self.name}
        make = planner(model, options, optimizer, self.ranks)
        made = make(self.target, self.tokens, {"measure": measure})
        here = len(self.options.get("nvme", ("",)))
        disks = here if self.target is None else self.target.disks
        more = gains(make, made, self.target, self.tokens, disks, self.ranks)
        if trace is not None and made.detail.simulated is not None:
            save_trace(made.detail.simulated.trace, trace)
        return made, more


def _tell_choices(asked: _Asked, found: Sequence[Choice]) -> None:
    """Prints ways to train; the exit code says whether any fits."""
    if asked.as_json:
        print(json.dumps(choices_json(found, asked.step_tokens), indent=2))
    else:
        show_choices(found, asked.step_tokens)
    if not any(each.plan.fits for each in found):
        raise typer.Exit(REFUSED)


def _tell_plan(
    asked: _Asked, made: Plan, more: Mapping[str, float], endurance: str | None, *, every_unit: bool
) -> None:
    """Prints a plan; the exit code says whether it fits."""
    from ..planning.budgets import beyond_this_machine

    tokens, machine = asked.step_tokens, asked.target
    budgets = made.detail.budgets
    if machine is None and budgets is not None and (why := beyond_this_machine(budgets)):
        typer.echo(why, err=True)
    if asked.as_json:
        print(json.dumps(plan_json(made, tokens, more, machine, endurance), indent=2))
    else:
        if asked.ranks > 1:
            typer.echo(f"one of {asked.ranks} ranks, with its part of the machine; tokens/s of all")
        show_plan(made, tokens, more, machine, endurance, every_unit=every_unit)
    if made.detail.activations_fit is False:
        raise typer.Exit(TOO_MANY_ACTIVATIONS)
    if not made.fits:
        raise typer.Exit(REFUSED)
