"""Export of the commit that all ranks of a run share, as files for other tools."""

from __future__ import annotations

from pathlib import Path

from ..durable.export import Exported, Named, config_text, write_export
from ..durable.files import SHARD_BYTES, Note
from ..durable.hub import ModelFiles
from ..durable.inspect import require_unmoved
from ..durable.tensors import whole_stacks
from ..io_engine.committed import find_store
from .stores import RunSource, RunStores


def export_run(
    run: RunStores, out: Path, *, config: Path | str | None = None, optimizer: bool = True,
    shard_bytes: int = SHARD_BYTES, note: Note = lambda nbytes: None, named: Named = whole_stacks,
) -> Exported:  # fmt: skip
    """Write whole parameters, assembled from the rows of all ranks, as ``export_store`` does.

    One process does it, with memory for a few parts; no rank needs to run.

    Raises:
        OffloadError: ``out`` exists, its disk has too little room, or training continued meanwhile.
        IoError, CorruptionError: a store cannot be read. Nothing was exported.
    """
    source = RunSource(run)
    try:
        tree = source.state_dict() if optimizer else None
        text = None if config is None else config_text(config)
        files = write_export(
            out, [ModelFiles(named(source.weights()), text)], tree, run.step,
            shard_bytes=shard_bytes, note=note, check=lambda: _require_unmoved(run),
        )  # fmt: skip
    finally:
        source.close()
    return Exported(run.step, files)


def _require_unmoved(run: RunStores) -> None:
    for store, generation in zip(run.stores, run.generations, strict=True):
        now = find_store(store.directories)
        if store.last().number == generation.number:
            require_unmoved(store, generation, now)
