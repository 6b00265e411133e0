"""Folders written by ``torch.distributed.checkpoint``, read one tensor at a time.

No process group is needed, no matter how many ranks wrote the folder.  ``.metadata`` is a pickle;
the unpickler accepts only the few classes that torch puts there, so loading an untrusted folder
cannot run code.  Tensors and values are loaded with ``weights_only``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ..io_engine.file_ranges import FileState
from .weight_files import DISTRIBUTED

# Common prefixes of the keys of both; torch's own examples use "app", "model" and "optim".
_WEIGHTS = ("", "model.", "app.model.")
_STATES = ("", "optim.", "optimizer.", "app.optim.", "app.optimizer.")
_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip

_FAILURES = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, CheckpointException)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or value is torch.Size:
            return value
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """torch's reader with metadata that has already been read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


class _Planner(DefaultLoadPlanner):
    """torch's planner, but values that are not tensors are unpickled with ``weights_only``."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class DistributedFolder:
    """The tensors and values of a checkpoint, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with (path / DISTRIBUTED).open("rb") as file:
                metadata = _load(file)
        except (OSError, ValueError, EOFError, AttributeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path / DISTRIBUTED} cannot be read: {error}") from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        self._reader = _Reader(path, metadata)
        self._known: Mapping[str, Any] = metadata.state_dict_metadata

    # -- weights --------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """An empty list: the folder does not say which of its tensors are weights."""
        return []

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight, or ``None`` if there is no such tensor."""
        key = self._key(name)
        return None if key is None else tuple(self._known[key].size)

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        key = self._key(name)
        return () if key is None else (self._known[key].properties.dtype,)

    def read(self, name: str) -> torch.Tensor:
        """Read one weight."""
        key = self._key(name)
        assert key is not None
        return self.tensor(key)

    def state(self, path: Path) -> FileState:
        """Raise ``KeyError``: ``find`` never returns a file."""
        raise KeyError(path)

    def find(self, name: str) -> None:
        """Return ``None``: tensors are in torch's own archives and cannot be read in place."""
        return None

    def find_quantised(self, name: str) -> None:
        """Return ``None``, as ``find`` does."""
        return

    def _key(self, name: str) -> str | None:
        keys = (root + name for root in _WEIGHTS)
        return next(
            (k for k in keys if isinstance(self._known.get(k), TensorStorageMetadata)), None
        )

    # -- anything -------------------------------------------------------------------------------

    def keys(self, under: str) -> list[str]:
        """Return the keys that begin with ``under``."""
        return [key for key in self._known if key.startswith(under)]

    def like(self, key: str) -> torch.Tensor | None:
        """Return a meta tensor of a key's shape and dtype, or ``None`` if it is not a tensor."""
        found = self._known[key]
        if not isinstance(found, TensorStorageMetadata):
            return None
        return torch.empty(found.size, dtype=found.properties.dtype, device="meta")

    def tensor(self, key: str) -> torch.Tensor:
        """Read one tensor, assembled from its shards."""
        like = self.like(key)
        assert like is not None
        return self._read(key, torch.empty_like(like, device="cpu"))  # type: ignore[no-any-return]

    def value(self, key: str) -> Any:
        """Read a key's tensor or other value."""
        if isinstance(self._known[key], BytesStorageMetadata):
            return self._read(key, None)
        return self.tensor(key)

    def _read(self, key: str, into: Any) -> Any:
        found = {key: into}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about the missing process group
                load(found, storage_reader=self._reader, planner=_Planner(), no_dist=True)
        except _FAILURES as error:
            raise ValueError(f"{self.path}: {key!r} cannot be read: {error}") from error
        return found[key]


def _load(file: BinaryIO) -> Metadata:
    found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    return found


class StoredState(Mapping[str, Any]):
    """The state of one parameter; values are read on access and not cached."""

    def __init__(self, folder: DistributedFolder, under: str, fields: Sequence[str]) -> None:
        self._folder, self._under, self._fields = folder, under, tuple(fields)

    def __getitem__(self, field: str) -> Any:
        if field not in self._fields:
            raise KeyError(field)
        return self._folder.value(self._under + field)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def like(self, field: str) -> torch.Tensor | None:
        """See ``DistributedFolder.like``."""
        return self._folder.like(self._under + field)


def optimizer_state(
    path: Path, model: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` in torch's format, whose tensors are still on disk.

    Its keys in the folder may be names (``get_optimizer_state_dict``, flattened or not) or numbers
    (``optimizer.state_dict()``).

    Raises:
        ValueError: the folder has no state, or state of parameters that the model lacks.
    """
    folder = DistributedFolder(path)
    root = next((root for root in _STATES if folder.keys(f"{root}state.")), None)
    if root is None:
        tops = sorted({key.partition(".")[0] for key in folder.keys("")})
        raise ValueError(
            f"{path} holds no optimizer state under {', '.join(_STATES[1:])} (its keys begin with "
            f"{', '.join(tops[:6])}); load its weights alone, with weights="
        )
    fields: dict[str, list[str]] = {}
    start = len(f"{root}state.")
    for key in folder.keys(f"{root}state."):
        owner, _, field = key[start:].rpartition(".")
        fields.setdefault(owner, []).append(field)
    names = _names(model, groups, numbered=all(owner.isdecimal() for owner in fields))
    state, number, kept = {}, 0, []
    for group, members in zip(groups, names, strict=True):
        first = number
        for listed in members:
            found = next((name for name in listed if name in fields), None)
            if found is not None:
                under = f"{root}state.{found}."
                state[number] = StoredState(folder, under, fields.pop(found))
            number += 1
        scalars = _scalars(folder, f"{root}param_groups.", members[0]) if members else {}
        kept.append({**scalars, "params": list(range(first, first + len(group["params"])))})
    if fields:
        raise ValueError(
            f"{path} has the state of {', '.join(sorted(fields)[:3])}, {len(fields)} in all, which "
            "the optimizer does not train: it is that of another model, or of other groups"
        )
    return {"state": state, "param_groups": kept}


def _names(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], *, numbered: bool
) -> list[list[list[str]]]:
    """Return the possible names of each parameter in the folder, by group."""
    if numbered:
        numbers = iter(range(sum(len(group["params"]) for group in groups)))
        return [[[str(next(numbers))] for _ in group["params"]] for group in groups]
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [[names[id(p)] for p in group["params"]] for group in groups]


def _scalars(folder: DistributedFolder, under: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the hyper-parameters of the group with a parameter that has one of these names."""
    for name in names:  # in flattened state every parameter has them
        keys = [k for k in folder.keys(f"{under}{name}.") if "." not in k[len(under + name) + 1 :]]
        if keys and f"{under}{name}.params" not in keys:
            return {key.rpartition(".")[2]: folder.value(key) for key in keys}
    for listed in (key for key in folder.keys(under) if key.endswith(".params")):
        group = listed.removesuffix("params")
        if {str(member) for member in folder.value(listed)} & set(names):
            keys = [key for key in folder.keys(group) if key != listed]
            return {key[len(group) :]: folder.value(key) for key in keys}
    return {}


__all__ = ["DistributedFolder", "StoredState", "optimizer_state"]
