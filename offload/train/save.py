"""Weights of a model, wrapped or not, written as safetensors one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from ..durable.files import write_safetensors
from ..durable.tensors import StreamedTensor, in_memory, lazy
from ..engine import engine_of
from ..io_engine.atomic_files import replacing
from ..observe.long_work import LongWork
from ..private import module_private


def _entries(model: nn.Module) -> Iterator[tuple[torch.Tensor, StreamedTensor]]:
    """Every parameter once, under its first name, and every kept buffer, each with its values."""
    engine = engine_of(model)
    order = {} if engine is None else {id(p): i for i, p in enumerate(engine.parameters)}

    def value_of(p: torch.Tensor) -> Callable[[], torch.Tensor]:
        index = order.get(id(p))
        if hasattr(p, "full_tensor"):  # a shard: every rank reads it
            return lambda: p.full_tensor().detach()
        if engine is None or index is None:
            return p.detach
        read, number = engine.read, index
        return lambda: read(number)

    for name, p in model.named_parameters():
        yield p, lazy(name, p.dtype, p.shape, value_of(p))
    for prefix, module in model.named_modules():
        for name, buffer in module_private.persistent_buffers(module).items():
            yield buffer, in_memory(f"{prefix}.{name}" if prefix else name, buffer)


def save_weights(model: nn.Module, path: Path) -> int:
    """Writes the current weights; returns the file's size in bytes.

    Memory for the largest tensor is taken, never for the model.  The file appears whole or not at
    all.  A tied parameter is written once, as Hugging Face does.
    """
    return _write([tensor for _, tensor in _entries(model)], path)


def read_along(model: nn.Module) -> None:
    """Take part in ``save_weights`` of a sharded model on ranks that do not write.

    The writing rank needs their rows, one parameter after the other.
    """
    for p in model.parameters():
        if hasattr(p, "full_tensor"):
            p.full_tensor()


def save_masters(model: nn.Module, path: Path) -> int:
    """As ``save_weights`` for a wrapped model, with every trained parameter's exact fp32 value."""
    engine = engine_of(model)
    assert engine is not None, "only a wrapped model has masters"
    names = {id(p): name for name, p in model.named_parameters()}
    params = engine.parameters
    trained = engine.trained
    masters = (value for _, value in engine.masters())
    tensors = [
        lazy(
            names[id(params[s.index])], torch.float32, params[s.index].shape, lambda: next(masters)
        )
        for s in trained
    ]
    known = {id(params[spec.index]) for spec in trained}
    return _write([*tensors, *(t for p, t in _entries(model) if id(p) not in known)], path)


def _write(tensors: list[StreamedTensor], path: Path) -> int:
    work = LongWork(f"writing {path.name}", sum(t.nbytes for t in tensors))
    with replacing(path) as draft, work as done:
        written = write_safetensors(tensors, draft, done)
    return written.nbytes
