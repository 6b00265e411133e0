"""Selection of the units that can be read in place, from the files that ``weights=`` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ..io_engine.ranges import FilePart, FileRanges
from ..planning.partition import Partition
from ..planning.sources import Sources
from ..schedule.units import Chunk, ParamSpec, Unit
from .weight_files import InFiles, TensorFiles


def sources_of(files: TensorFiles, names: Mapping[int, str], parts: Partition) -> Sources:
    """Return the untrained units whose weights lie in the files exactly as they do in memory.

    Args:
        names: the tensor's name in the files, by parameter index.
    """
    paths: dict[Path, int] = {}
    ranges: dict[int, FileRanges] = {}
    for unit in parts.units:
        if unit.trainable or unit.packed or not unit.weight_bytes:
            continue
        found = {spec.index: files.find(names[spec.index]) for _, spec in unit.params
                 if spec.index in names}  # fmt: skip
        if all(_as_in_memory(chunk, spec, found.get(spec.index)) for chunk, spec in unit.params):
            ranges[unit.index] = _ranges(unit, found, paths)
    states = tuple(map(files.state, paths))
    return Sources(tuple(path.absolute() for path in paths), ranges, states)


def _as_in_memory(chunk: Chunk, spec: ParamSpec, found: InFiles | None) -> bool:
    dense = torch.empty(spec.shape, device="meta").stride()
    return found is not None and found.dtype == chunk.dtype and spec.stride == dense


def _ranges(unit: Unit, found: Mapping[int, InFiles | None], paths: dict[Path, int]) -> FileRanges:
    parts: list[FilePart] = []
    for chunk, spec in unit.params:
        to = chunk.byte_offset + spec.offset * chunk.dtype.itemsize
        where = found[spec.index]
        assert where is not None
        for run in where.runs:
            number = paths.setdefault(run.path, len(paths))
            parts.append(FilePart(number, run.offset, run.nbytes, to))
            to += run.nbytes
    return FileRanges(unit.index, unit.weight_bytes, tuple(parts))
