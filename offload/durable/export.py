"""A store's last commit as files that others read: Hugging Face weights, torch optimizer state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OffloadError, format_bytes
from ..io_engine import find_store
from ..loading import OPTIMIZER
from .files import SHARD_BYTES, Note, write_shards, write_text, write_torch
from .source import StoreSource, require_unmoved
from .sums import SUMS, sums_text
from .tensors import StreamedTensor, Written

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Exported:
    """An export that is finished: the step it holds, and the bytes of each file."""

    step: int
    files: Mapping[str, int]


def export_store(
    paths: Paths, out: Path, *, config: Path | str | None = None, optimizer: bool = True,
    shard_bytes: int = SHARD_BYTES, note: Note = lambda nbytes: None,
) -> Exported:  # fmt: skip
    """Writes the last commit of a store to the folder ``out``; memory for a few parts is taken.

    Args:
        config: ``config.json`` of the model, or the folder it is in, to copy; or its text.
        optimizer: also write ``optimizer.pt``: moments and masters in fp32.
        shard_bytes: about the size of a weights file.
        note: told how many bytes were written.

    Raises:
        OffloadError: ``out`` is there already, or too little of its disk is free.
        IoError, CorruptionError: the store cannot be read; nothing was exported.
    """
    store = find_store(paths)
    source = StoreSource(store, store.last())
    try:
        tree = source.state_dict() if optimizer else None
        text = None if config is None else _config(config)
        files = write_export(
            out, source.weights(), tree, text, source.generation.step,
            shard_bytes=shard_bytes, note=note,
            check=lambda: require_unmoved(source, find_store(paths)),
        )  # fmt: skip
    finally:
        source.close()
    return Exported(source.generation.step, files)


def _config(path: Path | str) -> str:
    if isinstance(path, str):
        return path
    return (path / "config.json" if path.is_dir() else path).read_text()


def write_export(
    out: Path, weights: Sequence[StreamedTensor], tree: Mapping[str, Any] | None,
    config: str | None, step: int, *, shard_bytes: int = SHARD_BYTES,
    note: Note = lambda nbytes: None, check: Any = lambda: None,
) -> dict[str, int]:  # fmt: skip
    """Writes all files beside ``out`` and renames the folder when they are flushed.

    Whatever ends it before, ``out`` is not there, or empty as it was.
    """
    _require_room(out, weights, tree)
    draft = out.with_name(out.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    draft.mkdir(parents=True)
    try:
        files: dict[str, Written] = {}
        if config is not None:
            files["config.json"] = write_text(draft / "config.json", config)
        if tree is not None:
            files[OPTIMIZER] = write_torch(tree, draft / OPTIMIZER, note)
        files |= write_shards(weights, draft, note, shard_bytes)
        check()
        write_text(draft / SUMS, sums_text(files, step))
        draft.replace(out)
        fd = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {name: file.nbytes for name, file in files.items()}


def _require_room(
    out: Path, weights: Sequence[StreamedTensor], tree: Mapping[str, Any] | None
) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OffloadError(f"{out} is there already; choose another place, or remove it")
    need = sum(tensor.nbytes for tensor in weights)
    for state in (tree or {"state": {}})["state"].values():
        need += sum(value.nbytes for value in state.values())
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if need > free:
        raise OffloadError(
            f"the export to {out} needs {format_bytes(need)} of disk; {format_bytes(free)} are "
            "free there; make room, export elsewhere, or leave the optimizer's state out"
        )
