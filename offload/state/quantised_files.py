"""Quantised files, read under the names and with the values of unquantised ones."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

import torch

from ..io_engine.file_ranges import FileState
from ..quantised.format_base import QuantisedWeight, UnreadableFormat
from ..quantised.format_table import find
from .weight_files import FileRun, InFiles, QuantisedInFiles, QuantisedRuns, WeightFiles

# Scales of activations, which only quantised computation uses.
_UNUSED = (
    ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".input_global_scale",
    ".input_scale_ub", ".input_zero_point", ".scale_input", "scaled_fp8",
)  # fmt: skip
_GPTQ_CONFIG = "quantize_config.json"  # of GPTQ folders that are older than transformers' support


class QuantisedFiles:
    """``TensorFiles`` in which each quantised weight is one tensor, over the files as they are."""

    def __init__(
        self, files: WeightFiles, found: Mapping[str, QuantisedWeight], own: Container[str]
    ) -> None:
        """Set up; ``own``: names of the model's tensors."""
        self.path: Path = files.path
        self._files, self._found = files, found
        used = {name for each in found.values() for name in each.others}
        for each in found.values():
            used.update(s.name for piece in each.pieces for s in piece.sources.values())
        self._others = [
            name for name in files.names
            if name not in used and not (name.endswith(_UNUSED) and name not in own)
        ]  # fmt: skip

    @property
    def names(self) -> list[str]:
        """See ``TensorFiles``; tensors that belong to quantised weights are left out."""
        return [*self._found, *self._others]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorFiles``."""
        found = self._found.get(name)
        return self._files.shape(name) if found is None else found.shape

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``; of a quantised weight, that to which it is dequantised."""
        found = self._found.get(name)
        return self._files.dtypes(name) if found is None else (found.dtype,)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorFiles``; a quantised weight is dequantised."""
        found = self._found.get(name)
        if found is None:
            return self._files.read(name)
        weight = torch.empty(found.shape, dtype=found.dtype, device="cpu")
        tensors: dict[str, torch.Tensor] = {}  # of all pieces, by name in the files
        for piece in found.pieces:
            own = {}
            for key, source in piece.sources.items():
                if source.name not in tensors:
                    tensors[source.name] = self._files.read(source.name).contiguous()
                stored = piece.form.tensors[key]
                flat = tensors[source.name].reshape(-1).view(torch.uint8)
                flat = flat[source.first_byte :][: stored.nbytes]
                own[key] = flat.view(stored.dtype).view(stored.shape)
            part = weight.view(-1)[piece.start :][: piece.form.numel]
            piece.form.dequantise(own, part)
        return weight

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``."""
        return self._files.find(name) if name not in self._found else None

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """See ``TensorFiles``."""
        found = self._found.get(name)
        if found is None:
            return None
        pieces = []
        for piece in found.pieces:
            runs = {}
            for key, source in piece.sources.items():
                run, nbytes = self._files.run(source.name), piece.form.tensors[key].nbytes
                runs[key] = (FileRun(run.path, run.offset + source.first_byte, nbytes),)
            pieces.append(QuantisedRuns(piece.start, piece.form, runs))
        return QuantisedInFiles(tuple(pieces))

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        return self._files.state(path)


def dequantising(
    files: WeightFiles, own: Mapping[str, torch.Tensor]
) -> WeightFiles | QuantisedFiles:
    """Return ``files`` such that quantised weights in them are read as ordinary ones.

    Args:
        own: the model's tensors, also by their names from before adapters.  If they include the
            codes of a weight, the model computes with quantised weights itself, and files are
            returned as they are.

    Raises:
        ValueError: weights are in a format that cannot be read, or are incomplete.
    """
    try:
        found = find(files, quantisation_of(files.path))
    except UnreadableFormat as error:
        raise ValueError(f"weights: {files.path}: {error}") from error
    if any(_is_own(each, own) for each in found.values()):
        return files
    found = _shaped(found, own)
    return QuantisedFiles(files, found, own) if found else files


def _shaped(
    found: Mapping[str, QuantisedWeight], own: Mapping[str, torch.Tensor]
) -> dict[str, QuantisedWeight]:
    """Return weights in the model's shapes, if the files do not tell their shapes."""
    if not any(each.flat for each in found.values()):
        return dict(found)
    inner = {name.partition(".")[2]: tensor for name, tensor in own.items()}

    def shaped(name: str, each: QuantisedWeight) -> QuantisedWeight:
        # With and without the prefix of the base model, as for other weights.
        names = (own.get(name), own.get(name.partition(".")[2]), inner.get(name))
        mine = next((t for t in names if t is not None), None)
        fits = each.flat and mine is not None and mine.numel() == math.prod(each.shape)
        return each._replace(shape=tuple(mine.shape)) if fits and mine is not None else each

    return {name: shaped(name, each) for name, each in found.items()}


def _is_own(found: QuantisedWeight, own: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the model has the tensors of a quantised weight instead of the weight."""
    mine = own.get(found.name)
    if mine is not None:
        return not mine.is_floating_point() or mine.element_size() == 1
    return any(s.name in own for piece in found.pieces for s in piece.sources.values())


def quantisation_of(path: Path) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a folder or of a file's folder; ``None``: it has none.

    Raises:
        ValueError: its configuration is not valid JSON.
    """
    path = path if path.is_dir() else path.parent
    config = _json(path / "config.json")
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, Mapping):
            # compressed-tensors' older files do not name it.
            method = "compressed-tensors" if key == "compression_config" else None
            return {"quant_method": method, **found}
        if found:
            return {"quant_method": found}
    if old := _json(path / _GPTQ_CONFIG):
        return {"quant_method": "gptq", **old}
    return None


def _json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"weights: {file} is not valid JSON: {error}") from error
    return told if isinstance(told, Mapping) else {}
