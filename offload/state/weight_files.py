"""Safetensors files, single or sharded, from which weights are imported or read in place."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..io_engine.file_ranges import FileState, state_of
from ..quantised.format_base import Format
from .adapters import adapter_parameters, base_of, names_in_base

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OPTIMIZER = "optimizer.pt"  # in the folder of an export
DISTRIBUTED = ".metadata"  # in every folder of torch.distributed.checkpoint


@dataclass(frozen=True)
class FileRun:
    """A contiguous range of bytes in a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class InFiles:
    """The location of a tensor in files: runs that make up a contiguous tensor in this order."""

    dtype: torch.dtype
    runs: tuple[FileRun, ...]


class QuantisedRuns(NamedTuple):
    """The location of a piece of a quantised weight: the runs of each tensor of its format."""

    start: int
    form: Format
    runs: Mapping[str, tuple[FileRun, ...]]


@dataclass(frozen=True)
class QuantisedInFiles:
    """The location of a quantised weight: pieces in the order of its elements."""

    pieces: tuple[QuantisedRuns, ...]


class TensorFiles(Protocol):
    """Files that hold tensors by name, and are read one tensor at a time."""

    path: Path

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or ``None`` if there is no such tensor."""
        ...

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """Return the dtypes in the files of a tensor, or of the tensors that it is made from."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        ...

    def find(self, name: str) -> InFiles | None:
        """Return where a tensor lies, or ``None`` if it has to be computed from the files."""
        ...

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """Return where a quantised weight lies; ``None`` if it is not quantised."""
        ...

    def state(self, path: Path) -> FileState:
        """Return the identity of a file at the time when its layout was read."""
        ...


class WeightFiles:
    """Tensors of a safetensors file or a (sharded) Hugging Face folder, read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._where: dict[str, Path] = {}
        self._headers: dict[Path, dict[str, tuple[torch.dtype, FileRun]]] = {}
        self._states: dict[Path, FileState] = {}
        for file in self._list(path):
            for name in self._open(file).keys():  # noqa: SIM118 (not a mapping)
                self._where[name] = file

    @staticmethod
    def _list(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise ValueError(f"weights: {path} does not exist")
        if (path / INDEX).is_file():
            try:
                names = list(json.loads((path / INDEX).read_text())["weight_map"].values())
                if not all(isinstance(name, str) for name in names):
                    raise TypeError("names of files must be strings")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"weights: {path / INDEX} is not a valid index: {error}"
                ) from error
            outside = [n for n in names if Path(n).is_absolute() or ".." in Path(n).parts]
            if outside:
                raise ValueError(
                    f"weights: {path / INDEX} names files outside of its folder: {outside[0]!r}"
                )
            files = [path / name for name in dict.fromkeys(names)]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ValueError(f"weights: {path} lacks {', '.join(missing)}")
            return files
        if (path / SINGLE).is_file():
            return [path / SINGLE]
        raise ValueError(f"weights: {path} holds none of {SINGLE}, {INDEX} and {DISTRIBUTED}")

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        key = str(file)
        if key not in self._files:
            try:
                self._states[file] = state_of(file)
                # For torch it would map the file as writable, which needs memory for all of it.
                self._files[key] = safe_open(key, framework="np")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"weights: {file} cannot be read as safetensors: {error}"
                ) from error
        return self._files[key]

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or ``None`` if there is no such tensor."""
        if name not in self._where:
            return None
        return tuple(self._open(self._where[name]).get_slice(name).get_shape())

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        kind = self._open(self._where[name]).get_slice(name).get_dtype()
        return (DTYPES[kind],) if kind in DTYPES else ()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        found = self.find(name)
        if found is None:
            kind = self._open(self._where[name]).get_slice(name).get_dtype()
            raise ValueError(
                f"weights: {self._where[name]}: {name} is {kind}, which cannot be read"
            )
        return read_runs(found, self.shape(name) or ())

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``."""
        if not self.dtypes(name):
            return None
        dtype, run = self._entry(name)
        return InFiles(dtype, (run,))

    def find_quantised(self, name: str) -> None:
        """See ``TensorFiles``; ``QuantisedFiles`` knows what is quantised."""

    def run(self, name: str) -> FileRun:
        """Return where the bytes of a tensor of any dtype lie.

        Raises:
            KeyError: there is no such tensor, or its dtype is unknown.
        """
        if not self.dtypes(name):
            raise KeyError(name)
        return self._entry(name)[1]

    def _entry(self, name: str) -> tuple[torch.dtype, FileRun]:
        file = self._where[name]
        if file not in self._headers:
            self._headers[file] = _header(file, self._states[file])
        return self._headers[file][name]

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        return self._states[path]


# Keys are the names in the safetensors format.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


def _header(file: Path, opened: FileState) -> dict[str, tuple[torch.dtype, FileRun]]:
    """Read where the tensors of a safetensors file lie.

    The format: 8 bytes with the header's length, the header as JSON, then the tensors' bytes, to
    which offsets are relative.  The file was opened as safetensors before, so it is valid.

    Raises:
        ValueError: the file is not the one that was ``opened``.
    """
    with file.open("rb") as stream:
        if state_of(stream.fileno()) != opened:
            raise ValueError(f"weights: {file} has changed since it was opened")
        length = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(length))
    found = {}
    for name, entry in entries.items():
        if name != "__metadata__" and entry["dtype"] in DTYPES:
            start, stop = entry["data_offsets"]
            run = FileRun(file, 8 + length + start, stop - start)
            found[name] = DTYPES[entry["dtype"]], run
    return found


def read_runs(found: InFiles, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a tensor from its runs.

    Raises:
        ValueError: a file has changed.
    """
    made = torch.empty(shape, dtype=found.dtype, device="cpu")
    if sum(run.nbytes for run in found.runs) != made.nbytes:
        raise ValueError(f"weights: {found.runs[0].path} has changed since it was opened")
    if not made.nbytes:
        return made
    whole, at = made.view(-1).view(torch.uint8).numpy(), 0
    for run in found.runs:
        with run.path.open("rb") as stream:
            stream.seek(run.offset)
            if stream.readinto(whole[at : at + run.nbytes].data) != run.nbytes:
                raise ValueError(f"weights: {run.path} has become shorter since it was opened")
        at += run.nbytes
    return made


def cut_runs(runs: Sequence[FileRun], first: int, nbytes: int) -> Iterator[FileRun]:
    """Yield runs for ``nbytes`` from the byte ``first`` on of the concatenated ``runs``."""
    at = 0
    for run in runs:
        low, high = max(first, at), min(first + nbytes, at + run.nbytes)
        if low < high:
            yield FileRun(run.path, run.offset + low - at, high - low)
        at += run.nbytes


def match_files(
    files: TensorFiles, model: nn.Module, parameters: Sequence[nn.Parameter]
) -> dict[int, str]:
    """Return the name in the files of each parameter's tensor, by index in ``parameters``.

    Nothing is loaded.  A tied parameter may have any of its names, with or without the base model's
    prefix.  Tensors that transformers does not save for this model (computed tables) may be
    missing, and so may adapters.

    Args:
        model: the model of the parameters, or a part of it.

    Raises:
        ValueError: a parameter has no tensor, or one of another shape, or one that holds the codes
            of a quantised weight.
    """
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, list[str]] = {}
    index_of = {id(p): i for i, p in enumerate(parameters)}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in index_of:
            names.setdefault(index_of[id(p)], []).append(name)
    in_base, adapters = names_in_base(model), adapter_parameters(model)
    prefix = getattr(base_of(model), "base_model_prefix", "")
    found: dict[int, str] = {}
    problems: list[str] = []
    for index in sorted(names):
        p = parameters[index]
        candidates = list(dict.fromkeys([*names[index], *map(in_base, names[index])]))
        if prefix:
            own = list(candidates)
            candidates += [n.removeprefix(f"{prefix}.") for n in own]
            candidates += [f"{prefix}.{n}" for n in own]
        match = next((n for n in candidates if files.shape(n) is not None), None)
        if match is None and not left_out.isdisjoint(names[index]):
            continue
        if match is None and p in adapters:
            continue
        if match is None:
            problems.append(f"{names[index][0]} is missing")
        elif why := _no_weight(files.dtypes(match), p.dtype):
            problems.append(f"{match} {why}")
        elif files.shape(match) != tuple(p.shape):
            problems.append(f"{match} has shape {files.shape(match)}, expected {tuple(p.shape)}")
        else:
            found[index] = match
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"weights: {files.path} does not match the model: {'; '.join(problems[:3])}{more}"
        )
    return found


def _no_weight(dtypes: Collection[torch.dtype], wanted: torch.dtype) -> str | None:
    """Return why tensors of ``dtypes`` are not the values of a parameter of dtype ``wanted``."""
    if not dtypes:
        return "has a dtype that cannot be read"
    if set(dtypes) == {wanted}:
        return None  # the model computes with them
    if not (wanted.is_floating_point or wanted.is_complex):
        return f"is {', '.join(map(str, dtypes))}, and the model has {wanted} there"
    for dtype in dtypes:
        number = dtype.is_floating_point or dtype.is_complex
        if not number or (dtype.itemsize == 1 and wanted.itemsize > 1):
            return (
                f"is {dtype}: codes of a quantised weight, and the files have no scales for them "
                "that are known; use a folder with bf16, fp16 or fp32 weights"
            )
    return None
