"""Options that several sub-commands share, and the keywords of ``wrap`` made from them.

What is not given is not passed on, so that the engine's own defaults hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..facts.rates import Rates

Model = Annotated[
    str,
    typer.Option(help="A Hugging Face model folder, or a named shape (random weights)."),
]
Device = Annotated[
    str | None,
    typer.Option(help="An accelerator such as cuda[:i], cpu or sim; default: it, else cpu."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="What the engine may hold on the device: 10GiB, 80% or auto."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(help="What the engine may hold in host memory."),
]
Nvme = Annotated[
    list[Path] | None,
    typer.Option(help="Folder on a fast disk; given several times, the store is striped."),
]
NvmeMemory = Annotated[str | None, typer.Option(help="Disk that the store may use.")]
Precision = Annotated[
    str | None,
    typer.Option(help="Weights in bf16, fp16 or fp32; default: the model's own."),
]
Master = Annotated[
    str | None, typer.Option(help="fp32 masters of low-precision weights: split, fp32 or auto.")
]
Moments = Annotated[str | None, typer.Option(help="Format of the moments: fp32, bf16 or int8.")]
Activations = Annotated[
    str | None,
    typer.Option(
        help="What autograd saves for backward: keep, host, nvme, recompute, selective, or auto, "
        "which moves what the budgets have no room for."
    ),
]
ActivationsFormat = Annotated[
    str | None,
    typer.Option(help="Move activations as int8, which loses precision; default: as they are."),
]
Frozen = Annotated[
    str | None,
    typer.Option(help="Keep and move matrices in this format, unpacked before use: int8 or nf4."),
]
Update = Annotated[
    str | None, typer.Option(help="When weights are updated: step, backward, next_forward or auto.")
]
MaxGradNorm = Annotated[
    float | None, typer.Option(help="Clip gradients to this global norm, exactly.")
]
Accumulate = Annotated[int, typer.Option(help="Micro-batches per step.")]
Units = Annotated[
    list[str] | None,
    typer.Option(help="Name of a module that forms a unit; may be given several times."),
]
Resident = Annotated[
    list[str] | None,
    typer.Option(help="Name of a module that never leaves the device; may be given several times."),
]
PrefetchDepth = Annotated[int | None, typer.Option(help="Units fetched ahead of their use.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the optimizer update.")]
RatesFile = Annotated[
    Path | None,
    typer.Option("--rates", help="JSON file of machine rates; default: measured once."),
]
NotDurable = Annotated[
    bool | None,
    typer.Option(
        "--durable/--not-durable",
        help="Keep every step's state safe on disk, or half the disk space.",
    ),
]
CommitEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps from one commit of a durable store to the next.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def wrap_options(
    *, nvme: Sequence[Path] | None, units: Sequence[str] | None, resident: Sequence[str] | None,
    rates: Path | None, **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the keywords for ``wrap`` and ``plan`` that were given on the command line."""
    options = {name: value for name, value in given.items() if value is not None}
    if nvme:
        options["nvme"] = list(nvme)
    for name, modules in (("units", units), ("resident", resident)):
        if modules:
            options[name] = list(modules)
    if rates is not None:
        options["rates"] = Rates.from_file(rates)
    return options
