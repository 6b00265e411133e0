"""Which of a framework's checkpoint folders are complete.

overspill publishes a checkpoint as a whole (see Note [Atomic writes]); a framework that was killed
while it wrote one itself leaves a part of it under the final name.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..state.weight_files import INDEX

log = logging.getLogger("overspill")

_TORCH = (".pt", ".pth", ".bin", ".pkl")
# Prefixes of the names of JSON files that frameworks read; other files are the user's.
_JSON = (
    "adapter_config", "added_tokens", "chat_template", "config", "generation_config", "model",
    "optimizer", "preprocessor_config", "processor_config", "pytorch_model", "special_tokens_map",
    "tokenizer", "trainer_state", "vocab",
)  # fmt: skip
_SECTOR = 512  # bytes; users' files may begin with a few zeros
_LARGEST_HEADER_BYTES = 100_000_000  # as safetensors allows


def newest_complete(folder: Path, prefix: str, required: Sequence[str] = ()) -> Path | None:
    """Find the complete checkpoint with the highest number, and log which were skipped.

    Args:
        folder: where checkpoints are.
        prefix: of their names; a number follows it.
        required: names of files that each must have.

    Returns:
        Its folder; ``None`` if there are no checkpoints.

    Raises:
        ValueError: there are checkpoints, and none is complete.
    """
    named = re.compile(re.escape(prefix) + r"(\d+)")
    numbered = [
        (int(match[1]), each)
        for each in (folder.iterdir() if folder.is_dir() else ())
        if (match := named.fullmatch(each.name)) and each.is_dir()
    ]
    skipped: list[str] = []
    for _, checkpoint in sorted(numbered, reverse=True):
        problem = problem_of(checkpoint, required)
        if problem is None:
            for each in skipped:
                log.warning("overspill: skipped an incomplete checkpoint: %s", each)
            log.info("overspill: the newest complete checkpoint is %s", checkpoint)
            return checkpoint
        skipped.append(problem)
    if skipped:
        raise ValueError(
            f"no checkpoint in {folder} is complete: {'; '.join(skipped)}; remove them to start "
            "from the beginning, or pass the path of another checkpoint"
        )
    return None


def problem_of(folder: Path, required: Sequence[str] = ()) -> str | None:
    """Say what is missing or cut off in a checkpoint's folder; ``None``: nothing.

    Looks at the beginning and the end of files, not at all of their contents.
    """
    for name in required:
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
    for file in sorted(each for each in folder.rglob("*") if each.is_file() or each.is_symlink()):
        try:
            wrong = _problem(file)
        except OSError as error:
            wrong = f"cannot be read: {error.strerror}"
        except RecursionError:
            wrong = "is nested too deeply"
        if wrong is not None:
            return f"{file} {wrong}"
    return None


def _problem(file: Path) -> str | None:
    if file.is_symlink() and not file.exists():
        return "is a link to a file that is missing"
    if not file.is_file():
        return None
    if file.suffix == ".json" and file.name.startswith(_JSON):
        return _of_json(file)
    if file.suffix == ".safetensors":
        return _of_safetensors(file)
    if file.suffix in _TORCH:
        return _of_torch(file)
    return None


def _of_json(file: Path) -> str | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError:
        return "is not complete JSON"
    if file.name == INDEX or file.name.endswith(".bin.index.json"):
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            return "does not list shards"
        lacking = {name for name in shards.values() if not (file.parent / name).is_file()}
        if lacking:
            return f"lists {min(lacking)}, which is missing"
    return None


def _of_safetensors(file: Path) -> str | None:
    have = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LARGEST_HEADER_BYTES + 1
        if length > _LARGEST_HEADER_BYTES:
            return "is not a complete safetensors file"
        try:
            header = json.loads(stream.read(length))
            ends = [int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            return "is not a complete safetensors file"
    need = 8 + length + max(ends, default=0)
    return None if have == need else f"has {have} bytes, expected {need}"


def _of_torch(file: Path) -> str | None:
    with file.open("rb") as stream:
        start = stream.read(_SECTOR)
    if len(start) < 2:
        return "is cut off" if start else "is empty"
    if start.startswith(b"PK") and not zipfile.is_zipfile(file):  # its directory is at the end
        return "is cut off"
    return None if any(start) else "begins with zeros, as after a power cut"


class LazyStateDict(dict[str, torch.Tensor]):
    """A state dict of a wrapped model in which each value is read when it is asked for: of a large
    model, adapters take a few."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.state_dict(keep_vars=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        with torch.no_grad():
            return super().__getitem__(name).clone()

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)
