"""``overspill generate``: text from a model whose weights need not fit in memory."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as opt
from .failures import one_line_errors


def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face model folder.", metavar="MODEL")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    tokens: Annotated[int, typer.Option(help="Tokens to make at most.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token; default: as the folder says."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    device: opt.Device = None,
    device_memory: opt.DeviceMemory = None,
    host_memory: opt.HostMemory = None,
    nvme: opt.Nvme = None,
    nvme_memory: opt.NvmeMemory = None,
    precision: opt.Precision = None,
    frozen: opt.Frozen = None,
    units: opt.Units = None,
    resident: opt.Resident = None,
    prefetch_depth: opt.PrefetchDepth = None,
    rates: opt.RatesFile = None,
    debug: opt.Debug = False,
) -> None:
    """Generate text with a model that need not fit in memory."""
    with one_line_errors(debug):
        from ..train.text_generation import generate as run
        from .heap import give_freed_memory_back

        give_freed_memory_back()
        offload = opt.wrap_options(
            device=device, device_memory=device_memory, host_memory=host_memory, nvme=nvme,
            nvme_memory=nvme_memory, precision=precision, frozen=frozen, units=units,
            resident=resident,
            prefetch_depth=prefetch_depth, rates=rates,
        )  # fmt: skip
        made = run(
            model, prompt, offload, tokens=tokens, temperature=temperature, seed=seed,
            write=lambda text: typer.echo(text, nl=False),
        )  # fmt: skip
        typer.echo(str(made), err=True)
