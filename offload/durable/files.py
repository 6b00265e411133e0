"""The files of an export: sharded safetensors, and a torch file of the optimizer's state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..loading import INDEX, SINGLE
from ..runtime import torch_private
from .tensors import FileWriter, StreamedTensor, Written, in_memory

SHARD_BYTES = 5 * 10**9  # as transformers cuts them
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Note = Callable[[int], None]  # told how many bytes were written


def write_shards(
    tensors: Sequence[StreamedTensor], out: Path, note: Note, shard_bytes: int = SHARD_BYTES
) -> dict[str, Written]:
    """Writes ``model.safetensors``, or several and their index last.

    Raises:
        ValueError: safetensors has no such dtype.
        OSError: a file cannot be written.
    """
    shards: list[list[StreamedTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: write_safetensors(shards[0], out / SINGLE, note)}
    written: dict[str, Written] = {}
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        written[name] = write_safetensors(shard, out / name, note)
        where |= dict.fromkeys((tensor.name for tensor in shard), name)
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    written[INDEX] = write_text(out / INDEX, json.dumps(index, indent=2))
    return written


def write_text(path: Path, text: str) -> Written:
    """A small file."""
    writer = FileWriter(path)
    writer.write(np.frombuffer(text.encode(), np.uint8))
    return writer.finish()


def write_safetensors(tensors: Sequence[StreamedTensor], path: Path, note: Note) -> Written:
    """Writes one file in the safetensors format.

    Raises:
        ValueError: safetensors has no such dtype.
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{tensor.name}: safetensors has no name for {tensor.dtype}")
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }  # fmt: skip
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    writer = FileWriter(path)
    try:
        writer.write(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        for tensor in tensors:
            _write_parts(writer, tensor, note)
        return writer.finish()
    finally:
        writer.abort()


def _write_parts(writer: FileWriter, tensor: StreamedTensor, note: Note) -> None:
    done = 0
    for part in tensor.parts():
        writer.write(part)
        note(part.size)
        done += part.size
    if done != tensor.nbytes:
        raise ValueError(f"{tensor.name}: expected {tensor.nbytes} bytes, got {done}")


def write_torch(tree: Mapping[str, Any], path: Path, note: Note) -> Written:
    """Writes what ``torch.save`` would, with every ``StreamedTensor`` in ``tree`` as a tensor.

    torch writes the file with holes for the tensors' bytes, and says where they are; then they are
    filled from the first to the last.
    """
    streamed: list[StreamedTensor] = []
    with torch_private.without_memory():
        fake = _replace(tree, streamed)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(fake, path)
        found = list(_tensors(torch.load(path, weights_only=True)))
    offsets = [torch_private.offset_in_file(tensor) for tensor in found]
    size = path.stat().st_size
    writer, at = FileWriter(path, over=True), 0
    try:
        for offset, tensor in sorted(zip(offsets, streamed, strict=True), key=lambda p: p[0]):
            if offset > at:
                writer.keep(offset - at)
            _write_parts(writer, tensor, note)
            at = offset + tensor.nbytes
        writer.keep(size - at)
        return writer.finish()
    finally:
        writer.abort()


def _replace(tree: Any, streamed: list[StreamedTensor]) -> Any:
    """The tree with tensors without memory; what they stand for goes to ``streamed``, in order."""
    if isinstance(tree, Mapping):
        return {key: _replace(value, streamed) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replace(value, streamed) for value in tree)
    if isinstance(tree, torch.Tensor):
        tree = in_memory("a value", tree)
    if isinstance(tree, StreamedTensor):
        streamed.append(tree)
        return torch.empty(tree.shape, dtype=tree.dtype, device="cpu")
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, torch.Tensor):
        yield tree
