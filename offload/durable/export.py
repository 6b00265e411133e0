"""Export of a store's last commit: Hugging Face weights and torch optimizer state."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CorruptionError, ExportError, format_bytes
from ..io_engine.atomic_files import free_bytes_at, remove_abandoned, replacing_folder
from ..io_engine.committed import FoundStore, find_store
from ..observe.long_work import LongWork
from ..planning.models import by_model
from ..state.weight_files import OPTIMIZER
from .files import SHARD_BYTES, Note, write_shards, write_text, write_torch
from .hub import ModelFiles, Read, config_of, of_model
from .inspect import read_pinned, require_unmoved
from .source import StoreSource
from .sums import SUMS, Written, sums_text
from .tensors import StreamedTensor, whole_stacks

_QUANTISATION = {"quantization_config", "compression_config"}  # of a configuration
Named = Callable[[Sequence[StreamedTensor]], Sequence[StreamedTensor]]
Split = Callable[[Sequence[StreamedTensor]], Sequence[ModelFiles]]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Exported:
    """A finished export: its step, and the size of each file in bytes."""

    step: int
    files: Mapping[str, int]


def export_store(
    paths: Paths, out: Path, *, config: Path | str | None = None, optimizer: bool = True,
    shard_bytes: int = SHARD_BYTES, note: Note = lambda nbytes: None, named: Named = whole_stacks,
    weights: Path | Mapping[str, Path] | None = None, split: Split | None = None,
) -> Exported:  # fmt: skip
    """Write the last commit of a store to the folder ``out``, with memory for only a few parts.

    A run that trains in the store continues, but does not commit until the export has ended.

    Args:
        config: the model's ``config.json`` to copy, or its folder; or the text itself.
        optimizer: also write ``optimizer.pt``: moments and masters in fp32.
        shard_bytes: the approximate size of a weights file.
        note: called with the number of bytes written.
        named: renames the weights as their readers expect.
        weights: the present folder of the files that the store reads weights from in place, if they
            were moved.
        split: returns the files of each model; ``config`` and ``named`` are not used then.

    Raises:
        OffloadError: ``out`` exists already, its disk has too little space, or the owner committed
            during the export (it called ``commit()``, or the store is not writable).
        IoError, CorruptionError: the store cannot be read; nothing was exported.
    """
    text = None if config is None else config_text(config)

    def read(store: FoundStore) -> Exported:
        source = StoreSource(store, store.last(), weights)

        def check(*, always: bool = False) -> None:
            if always or not store.layout.checksum:  # otherwise each block's checksum was verified
                require_unmoved(store, source.generation, find_store(paths))

        try:
            tree, tensors = source.state_dict() if optimizer else None, source.weights()
            models = [ModelFiles(named(tensors), text)] if split is None else split(tensors)
            files = write_export(
                out, models, tree, source.generation.step,
                shard_bytes=shard_bytes, note=note, check=check,
            )  # fmt: skip
        except CorruptionError:
            check(always=True)
            raise
        finally:
            source.close()
        return Exported(source.generation.step, files)

    return read_pinned(paths, read)


def export_model(model: nn.Module, out: Path, step: int, read: Read) -> None:
    """Write a model's tensors, as returned by ``read``, to the folder ``out`` with Hub names.

    Raises:
        OffloadError: ``out`` exists already, or its disk has too little space.
    """
    models = [
        ModelFiles(of_model(each, read), config_of(each), prefix.removesuffix("."))
        for prefix, each in by_model(model).items()
    ]
    write_export(out, models, None, step)


def config_text(path: Path | str) -> str:
    """Return the text of a ``config.json``, given its path, its folder, or the text."""
    if isinstance(path, str):
        return path
    return (path / "config.json" if path.is_dir() else path).read_text()


def _config(model: ModelFiles) -> str | None:
    """Return a model's configuration; it does not call weights quantised that are exported whole.

    It does if the model computes with quantised weights itself.
    """
    if model.config is None or any(_is_code(tensor) for tensor in model.weights):
        return model.config
    config = json.loads(model.config)
    if not isinstance(config, dict) or not _QUANTISATION & config.keys():
        return model.config
    return json.dumps({k: v for k, v in config.items() if k not in _QUANTISATION}, indent=2) + "\n"


def _is_code(tensor: StreamedTensor) -> bool:
    if not tensor.name.endswith("weight"):
        return tensor.name.endswith("weight_packed")
    return tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point


def write_export(
    out: Path, models: Sequence[ModelFiles], tree: Mapping[str, Any] | None, step: int, *,
    shard_bytes: int = SHARD_BYTES, note: Note = lambda nbytes: None,
    check: Any = lambda: None,
) -> dict[str, int]:  # fmt: skip
    """Write all files to a draft next to ``out``, flush them, and rename the folder.

    After an error, ``out`` does not exist, or is empty as before. See Note [Atomic writes].
    """
    _require_free_name(out)
    # Removed first, because abandoned drafts take up space.
    remove_abandoned(out.absolute().parent, re.escape(out.name))
    weights = [tensor for model in models for tensor in model.weights]
    _require_room(out, weights, tree)
    work = LongWork(f"writing {out.name}", _bytes_of(weights, tree))
    with replacing_folder(out) as draft, work as done:
        files: dict[str, Written] = {}

        def written(nbytes: int) -> None:
            done(nbytes)
            note(nbytes)

        for model in models:
            folder, own = draft / model.folder, dict[str, Written]()
            folder.mkdir(exist_ok=True)
            if (config := _config(model)) is not None:
                own["config.json"] = write_text(folder / "config.json", config)
            own |= write_shards(model.weights, folder, written, shard_bytes)
            files |= {str(Path(model.folder, name)): file for name, file in own.items()}
        if tree is not None:
            files[OPTIMIZER] = write_torch(tree, draft / OPTIMIZER, written)
        check()
        write_text(draft / SUMS, sums_text(files, step))
    return {name: file.nbytes for name, file in files.items()}


def _bytes_of(weights: Sequence[StreamedTensor], tree: Mapping[str, Any] | None) -> int:
    """Return the bytes of weights and the optimizer's state."""
    states = (tree or {"state": {}})["state"].values()
    return sum(tensor.nbytes for tensor in weights) + sum(map(_nbytes_in, states))


def _nbytes_in(tree: Any) -> int:
    """Return the bytes of all tensors in dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        return sum(map(_nbytes_in, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(_nbytes_in, tree))
    return int(getattr(tree, "nbytes", 0))


def _require_free_name(out: Path) -> None:
    there = out.is_symlink() or out.exists()
    if there and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} is there already; choose another place, or remove it")


def _require_room(
    out: Path, weights: Sequence[StreamedTensor], tree: Mapping[str, Any] | None
) -> None:
    need = _bytes_of(weights, tree)
    free = free_bytes_at(out)
    if need > free:
        raise ExportError(
            f"the export to {out} needs {format_bytes(need)} of disk; {format_bytes(free)} are "
            "free there; make room, export elsewhere, or leave the optimizer's state out"
        )
