"""``overspill train``: trains or fine-tunes a causal language model under memory budgets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..train.shapes import DEFAULT_SHAPE
from . import options as opt
from .failures import one_line_errors

Data = Annotated[
    Path | None,
    typer.Option(help="Text, jsonl or a folder; default: Python's own standard library sources."),
]


def train(
    model: opt.Model = DEFAULT_SHAPE,
    data: Data = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    batch: Annotated[int, typer.Option(help="Windows of text per micro-batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate; default: 3e-4 from random weights, else 2e-5."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(help="Steps over which lr rises to its value; default: a tenth of all."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and of the order of data.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for weights, pictures, trace and run.json.")
    ] = Path("runs/train"),
    compare: Annotated[
        bool, typer.Option("--compare", help="Also train the same steps in memory.")
    ] = False,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Compute activations again instead of keeping them."),
    ] = False,
    spread: Annotated[
        str, typer.Option(help="On several ranks (torchrun): fsdp (FSDP2) or ddp.")
    ] = "fsdp",
    resume: Annotated[
        list[Path] | None,
        typer.Option(help="Go on in this store, up to --steps; all folders of a striped one."),
    ] = None,
    device: opt.Device = None,
    device_memory: opt.DeviceMemory = None,
    host_memory: opt.HostMemory = None,
    nvme: opt.Nvme = None,
    nvme_memory: opt.NvmeMemory = None,
    precision: opt.Precision = None,
    master: opt.Master = None,
    moments: opt.Moments = None,
    activations: opt.Activations = None,
    activations_format: opt.ActivationsFormat = None,
    update: opt.Update = None,
    max_grad_norm: opt.MaxGradNorm = None,
    accumulate: opt.Accumulate = 1,
    units: opt.Units = None,
    resident: opt.Resident = None,
    prefetch_depth: opt.PrefetchDepth = None,
    threads: opt.Threads = None,
    rates: opt.RatesFile = None,
    durable: opt.NotDurable = None,
    commit_every: opt.CommitEvery = None,
    debug: opt.Debug = False,
) -> None:
    """Train or fine-tune a causal language model that need not fit in memory."""
    from ..train.job import Job, run
    from .heap import give_freed_memory_back
    from .progress import make_watch

    give_freed_memory_back()
    with one_line_errors(debug):
        offload = opt.wrap_options(
            device=device, device_memory=device_memory, host_memory=host_memory, nvme=nvme,
            nvme_memory=nvme_memory, precision=precision, master=master, moments=moments,
            activations=activations, activations_format=activations_format,
            commit_every=commit_every, update=update, threads=threads,
            max_grad_norm=max_grad_norm, units=units, resident=resident, durable=durable,
            prefetch_depth=prefetch_depth, rates=rates,
        )  # fmt: skip
        job = Job(
            model=model, data=data, steps=steps, batch=batch, seq=seq, accumulate=accumulate,
            lr=lr, warmup=warmup, seed=seed, out=out, compare=compare, recompute=recompute,
            resume=tuple(resume or ()), offload=offload, spread=spread,
        )  # fmt: skip
        watch = make_watch(Console(quiet=True) if os.environ.get("RANK", "0") != "0" else None)
        report = run(job, watch)
        if report is not None:
            watch.result(report)
