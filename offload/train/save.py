"""Weights of a model, wrapped or not, written as safetensors one tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from ..model_state import read_weight
from ..optimizer import engine_of
from ..runtime import torch_private

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Entry = tuple[str, torch.Tensor, Callable[[], torch.Tensor]]  # name, its like, its value


def _entries(model: nn.Module) -> Iterator[Entry]:
    """Every parameter once, under its first name, and every buffer that is kept."""
    engine = engine_of(model)
    order = {} if engine is None else {id(p): i for i, p in enumerate(engine.parts.parameters)}

    def value_of(p: torch.Tensor) -> Callable[[], torch.Tensor]:
        index = order.get(id(p))
        if engine is None or index is None:
            return p.detach
        return lambda: read_weight(engine, index)

    for name, p in model.named_parameters():
        yield name, p, value_of(p)
    for prefix, module in model.named_modules():
        for name, buffer in torch_private.persistent_buffers(module).items():
            yield f"{prefix}.{name}" if prefix else name, buffer, buffer.detach


def save_weights(model: nn.Module, path: Path) -> int:
    """Writes the current weights; returns the file's size in bytes.

    Memory for the largest tensor is taken, never for the model.  The file appears whole or not at
    all.  A tied parameter is written once, as Hugging Face does.
    """
    entries = list(_entries(model))
    return _write(
        [(name, like.dtype, tuple(like.shape)) for name, like, _ in entries],
        (value() for _, _, value in entries),
        path,
    )


def save_masters(model: nn.Module, path: Path) -> int:
    """As ``save_weights`` for a wrapped model, with every trained parameter's exact fp32 value."""
    engine = engine_of(model)
    assert engine is not None, "only a wrapped model has masters"
    engine.raise_if_unusable()
    engine.settle()
    names = {id(p): name for name, p in model.named_parameters()}
    params = engine.parts.parameters
    trained = [
        spec
        for unit in engine.parts.units
        for chunk in unit.chunks
        if chunk.group is not None
        for spec in chunk.params
    ]
    trained_ids = {id(params[spec.index]) for spec in trained}
    rest = [entry for entry in _entries(model) if id(entry[1]) not in trained_ids]
    header = [
        (names[id(params[s.index])], torch.float32, tuple(params[s.index].shape)) for s in trained
    ]
    header += [(name, like.dtype, tuple(like.shape)) for name, like, _ in rest]

    def values() -> Iterator[torch.Tensor]:
        for unit in engine.parts.units:
            for _, value in engine.contents.masters(unit.index):
                yield value
        for _, _, value_of in rest:
            yield value_of()

    return _write(header, values(), path)


def _write(
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]],
    values: Iterator[torch.Tensor],
    path: Path,
) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for (name, dtype, shape), value in zip(entries, values, strict=True):
                if value.dtype != dtype or tuple(value.shape) != shape:
                    raise ValueError(
                        f"{name}: expected {dtype} {shape}, got {value.dtype} {tuple(value.shape)}"
                    )
                flat = value.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return 8 + len(text) + offset
