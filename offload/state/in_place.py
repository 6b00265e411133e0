"""Selection of the units that can be read in place, from the files that ``weights=`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ..io_engine.file_ranges import FilePart, FileRanges
from ..optim.packed_layout import BORDER
from ..planning.partition import Partition
from ..planning.sources import Sources
from ..quantised.cast import Cast
from ..quantised.format_base import QuantisedPage
from ..schedule.units import PAGE, Chunk, PagePart, ParamSpec, Unit, align
from .weight_files import InFiles, QuantisedInFiles, TensorFiles

InPage = InFiles | QuantisedInFiles


def read_in_place(
    files: TensorFiles, names: Mapping[int, str], parts: Partition
) -> tuple[Partition, Sources]:
    """Return where the untrained units lie that can be read from the files as they are stored.

    Their weights lie in the files exactly as in memory, or are quantised there.  In the returned
    partition, units of quantised weights have pages with all tensors of these weights, one after
    the other.

    Args:
        names: the tensor's name in the files, by parameter index.
    """
    paths: dict[Path, int] = {}
    ranges: dict[int, FileRanges] = {}
    units: list[Unit] = []
    for unit in parts.units:
        found = _located(unit, files, names)
        units.append(_with_page(unit, found))
        if found and (units[-1].packed or _as_in_memory(unit, found)):
            ranges[unit.index] = _ranges(units[-1], found, paths)
    sources = Sources(
        tuple(path.absolute() for path in paths), ranges, tuple(map(files.state, paths))
    )
    return replace(parts, units=tuple(units)), sources


def _with_page(unit: Unit, found: Mapping[int, InPage]) -> Unit:
    if not any(isinstance(where, QuantisedInFiles) for where in found.values()):
        return unit
    parts: list[PagePart] = []
    offset = 0
    for chunk, spec in unit.params:
        where = found[spec.index]
        if isinstance(where, QuantisedInFiles):
            page = QuantisedPage(tuple((each.start, each.form) for each in where.pieces))
        elif where.dtype == chunk.dtype:
            page = None
        else:
            page = QuantisedPage(((0, Cast(spec.shape, where.dtype)),))
        nbytes = spec.numel * chunk.dtype.itemsize if page is None else page.nbytes
        parts.append(PagePart(page, offset, nbytes))
        offset += align(nbytes, BORDER)
    return replace(unit, page=tuple(parts), page_bytes=align(offset, PAGE))


def _located(unit: Unit, files: TensorFiles, names: Mapping[int, str]) -> dict[int, InPage]:
    """Return where the weights of a frozen unit lie, by parameter; empty if one has no place.

    Units that ``frozen=`` packs have none: they are computed from the files.
    """
    if unit.trainable or unit.packed or not unit.weight_bytes:
        return {}
    found: dict[int, InPage] = {}
    for _, spec in unit.params:
        name = names.get(spec.index)
        where = None if name is None else _location(files, name, spec)
        if where is None:
            return {}
        found[spec.index] = where
    quantised = any(isinstance(each, QuantisedInFiles) for each in found.values())
    return {} if quantised and unit.encloses else found


def is_from_files(unit: Unit) -> bool:
    """Return whether a unit's page has weights as another library has quantised them."""
    return any(isinstance(part.form, QuantisedPage) for part in unit.page)


def _location(files: TensorFiles, name: str, spec: ParamSpec) -> InPage | None:
    dense = torch.empty(spec.shape, device="meta").stride()
    if spec.stride != dense:
        return None
    where = files.find_quantised(name)
    if where is None:
        return files.find(name)
    ends = [0, *(piece.start + piece.form.numel for piece in where.pieces)]
    starts = [piece.start for piece in where.pieces]
    covers = starts == ends[:-1] and ends[-1] == spec.numel
    return where if covers and not spec.is_complex else None


def _as_in_memory(unit: Unit, found: Mapping[int, InPage]) -> bool:
    return all(
        isinstance(where := found[spec.index], InFiles) and where.dtype == chunk.dtype
        for chunk, spec in unit.params
    )


def _ranges(unit: Unit, found: Mapping[int, InPage], paths: dict[Path, int]) -> FileRanges:
    parts: list[FilePart] = []
    for number, (chunk, spec) in enumerate(unit.params):
        where = found[spec.index]
        to = unit.page[number].offset if unit.packed else _offset(chunk, spec)
        if isinstance(where, InFiles):
            parts += _parts(where, to, paths)
            continue
        form = unit.page[number].form
        assert isinstance(form, QuantisedPage)
        for piece, tensor, offset, _ in form.places():
            runs = where.pieces[piece].runs[tensor]
            parts += _parts(InFiles(torch.uint8, runs), to + offset, paths)
    return FileRanges(unit.index, unit.stored_bytes, tuple(parts))


def _offset(chunk: Chunk, spec: ParamSpec) -> int:
    return chunk.byte_offset + spec.offset * chunk.dtype.itemsize


def _parts(where: InFiles, to: int, paths: dict[Path, int]) -> list[FilePart]:
    parts = []
    for run in where.runs:
        number = paths.setdefault(run.path, len(paths))
        parts.append(FilePart(number, run.offset, run.nbytes, to))
        to += run.nbytes
    return parts
