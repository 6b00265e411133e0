"""The files of an export: sharded safetensors, and a torch file with the optimizer's state."""

from __future__ import annotations

import io
import json
import mmap
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ExportError
from ..state.weight_files import DTYPES, INDEX, SINGLE
from .sums import Written
from .tensors import Bytes, FileWriter, StreamedTensor, in_memory, stream

SHARD_BYTES = 5 * 10**9  # transformers' default
SHARD = "model-{:05}-of-{:05}.safetensors"
WEIGHTS = (SINGLE, INDEX)  # a folder with weights has one of them
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python lacks: mappings may exceed memory
# offset in a zip entry's local header of the lengths of its name and extra field
_NAME_AND_EXTRA = 26
Note = Callable[[int], None]  # called with the number of bytes written


def is_of_weights(name: str) -> bool:
    """Return whether ``write_shards`` writes files of this name."""
    return re.sub(r"[0-9]{5}", "{:05}", name) == SHARD or name in WEIGHTS


def write_shards(
    tensors: Sequence[StreamedTensor], out: Path, note: Note, shard_bytes: int = SHARD_BYTES
) -> dict[str, Written]:
    """Write ``model.safetensors``, or several shards and their index last, to a draft folder.

    See Note [Atomic writes]: the caller publishes the folder.

    Raises:
        ValueError: safetensors has no such dtype.
        IoError: a file cannot be written.
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
        name = SHARD.format(number, len(shards))
        written[name] = write_safetensors(shard, out / name, note)
        where |= dict.fromkeys((tensor.name for tensor in shard), name)
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    written[INDEX] = write_text(out / INDEX, json.dumps(index, indent=2))
    return written


def write_text(path: Path, text: str) -> Written:
    """Write a small file to a draft folder, and return its size and checksum."""
    data = np.frombuffer(text.encode(), np.uint8)
    writer = FileWriter(path, data.size)
    try:
        writer.write(data)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def write_safetensors(tensors: Sequence[StreamedTensor], path: Path, note: Note) -> Written:
    """Write one file in the safetensors format, to a draft.

    See Note [Atomic writes]: the caller publishes the file.

    Raises:
        ValueError: safetensors has no such dtype.
        IoError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"tensor {tensor.name!r} is {tensor.dtype}, which the safetensors format cannot "
                "hold; use torch.save(model.state_dict(), path) instead"
            )
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }  # fmt: skip
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns data to 8 bytes
    writer = FileWriter(path, 8 + len(text) + offset)
    try:
        writer.write(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        data = stream(tensors)
        for tensor in tensors:
            _write_tensor(writer, tensor, data, note)
        return writer.finish()
    finally:
        writer.abort()


def _write_tensor(
    writer: FileWriter, tensor: StreamedTensor, data: Iterator[Bytes], note: Note
) -> None:
    done = 0
    while done < tensor.nbytes and (part := next(data, None)) is not None:
        writer.write(part)
        note(part.size)
        done += part.size
    if done != tensor.nbytes:
        raise ValueError(f"{tensor.name}: expected {tensor.nbytes} bytes, got {done}")


def write_torch(tree: Mapping[str, Any], path: Path, note: Note) -> Written:
    """Write a draft of what ``torch.save`` writes, with ``StreamedTensor`` leaves as tensors.

    torch writes the file with holes for the tensors' bytes, which are then filled in order of their
    offsets. In between, the file is a valid one full of zeros: see Note [Atomic writes].

    Raises:
        IoError: the file cannot be written.
    """
    streamed: list[StreamedTensor] = []
    empty = _replace(tree, streamed)
    with torch.serialization.skip_data():
        torch.save(empty, path)
    del empty
    offsets = _holes(path, [tensor.nbytes for tensor in streamed])
    size = path.stat().st_size
    writer, at = FileWriter(path, size, over=True), 0
    placed = sorted(zip(offsets, streamed, strict=True), key=lambda pair: pair[0])
    try:
        data = stream(tensor for _, tensor in placed)
        for offset, tensor in placed:
            if offset > at:
                writer.keep(offset - at)
            _write_tensor(writer, tensor, data, note)
            at = offset + tensor.nbytes
        writer.keep(size - at)
        return writer.finish()
    finally:
        writer.abort()


def torch_bytes(tree: Any) -> bytes:
    """Return what ``torch.save`` writes for a small object."""
    target = io.BytesIO()
    torch.save(tree, target)
    return target.getvalue()


def _holes(path: Path, sizes: Sequence[int]) -> list[int]:
    """Return the offsets of a torch file's storages, in the order in which torch numbers them.

    Raises:
        OffloadError: the file's layout is not the known one.
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        found: dict[int, int] = {}
        for entry in archive.infolist():
            _, folder, name = entry.filename.rpartition("/data/")
            if not folder or not name.isdecimal():
                continue
            file.seek(entry.header_offset + _NAME_AND_EXTRA)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            place = file.tell() + name_bytes + extra_bytes
            if int(name) < len(sizes) and entry.file_size == sizes[int(name)]:
                found[int(name)] = place
    if len(found) != len(sizes):
        raise ExportError(f"{path}: the file layout of torch {torch.__version__} is not supported; "
                           "export with another version of torch")  # fmt: skip
    return [found[number] for number in range(len(sizes))]


def _replace(tree: Any, streamed: list[StreamedTensor]) -> Any:
    """Replace streamed tensors in a tree by tensors over untouched memory.

    The replaced ones are appended to ``streamed`` in order.
    """
    if isinstance(tree, Mapping):
        return {key: _replace(value, streamed) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_replace(value, streamed) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)(_replace(value, streamed) for value in tree)
    if isinstance(tree, torch.Tensor):
        tree = in_memory("a value", tree)
    if isinstance(tree, StreamedTensor):
        streamed.append(tree)
        if tree.nbytes == 0:
            return torch.empty(tree.shape, dtype=tree.dtype, device="cpu")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        memory = mmap.mmap(-1, tree.nbytes, flags=flags)
        return torch.frombuffer(memory, dtype=tree.dtype).view(tree.shape)
    return tree
