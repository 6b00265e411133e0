"""``overspill export``: a store's last commit as files for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .failures import one_line_errors


def export(
    store: Annotated[Path, typer.Argument(help="Directory of the store; one, if striped.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    config: Annotated[
        Path | None,
        typer.Option(
            help="The model's config.json, or its folder: it is copied; names become those that "
            "from_pretrained looks for."
        ),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option(help="Also write optimizer.pt: moments and masters in fp32.")
    ] = True,
    weights: Annotated[
        Path | None,
        typer.Option(help="Where the files are now that the store reads frozen weights from."),
    ] = None,
    debug: opt.Debug = False,
) -> None:
    """Write weights as Hugging Face safetensors, and the optimizer's state as a torch file."""
    with one_line_errors(debug):
        from ..durable.export import export_store
        from ..durable.hub import named_by_config
        from ..durable.tensors import whole_stacks
        from ..errors import format_bytes
        from ..ranks.stores import export_run, find_run

        named = whole_stacks if config is None else named_by_config(config)
        run = find_run([store])
        if run is None or not run.ranks:
            done = export_store(
                store, out, config=config, optimizer=optimizer, named=named, weights=weights
            )
        else:
            done = export_run(
                run, out, config=config, optimizer=optimizer, named=named, weights=weights
            )
        for name, nbytes in done.files.items():
            typer.echo(f"wrote {out / name}, {format_bytes(nbytes)}")
        typer.echo(f"step {done.step}")
