"""Memory and weights for sharded models on ``meta``, or with weights in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ..errors import ModelError
from ..planning.partition import partition
from ..state.importing import Others, open_weights
from ..state.weight_files import match_files
from .parts import SpreadModule, rows_in


def memory_of(device: torch.device | str | None) -> torch.device:
    """Return the torch device of parameters on ``device``.

    ``None`` means the current accelerator if there is one, else the CPU.
    """
    if device is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu" if str(device) == "sim" else device)


def give_memory(model: nn.Module, device: torch.device | str | None) -> None:
    """Move shards on ``meta`` to ``device``, with arbitrary contents; buffers keep their values.

    Raises:
        OffloadError: only some of the parameters are on ``meta``.
    """
    on_meta = [p.is_meta for p in model.parameters()]
    if not any(on_meta):
        return
    if not all(on_meta):
        raise ModelError(
            "some parameters are on meta and others are not; build the whole model under "
            "overspill.empty_init(), or none of it"
        )
    there = memory_of(device)
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    model.to_empty(device=there)
    for module, name, buffer in buffers:
        setattr(module, name, buffer.to(there))


def fill_from_files(
    model: nn.Module, parts: Sequence[SpreadModule], weights: Path | Mapping[str, Path], rank: int,
    ignored: Sequence[str] = (),
) -> None:  # fmt: skip
    """Give every shard its rows of a tensor in files, and buffers their values there.

    This takes memory for one tensor.

    Args:
        ignored: patterns of names that the model need not use.

    Raises:
        ValueError: the files lack a parameter, have it in another shape, or have tensors that the
            model does not use. Nothing was changed.
    """
    files = open_weights(weights, model)
    found = partition(model, {})
    names = match_files(files, model, found)
    pieces = {id(piece.param): piece for part in parts for piece in part.shards}
    missing = [n for i, n in enumerate(map(id, found.parameters)) if i not in names]
    if missing:
        name = pieces[missing[0]].name
        raise ValueError(f"weights: {files.path} does not match the model: {name} is missing")
    managed = frozenset(map(id, found.parameters))
    Others(files, model, set(names.values()), managed, ignored).load()
    for index, p in enumerate(found.parameters):
        piece = pieces[id(p)]
        if count := rows_in(piece.local) if piece.local.numel() else 0:
            first = piece.first_row(rank)
            with torch.no_grad():
                piece.local.copy_(files.read(names[index])[first : first + count])
