"""Subgroups: slices of a chunk that one optimizer call updates, each with its state record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..schedule.units import PAGE, PARAM_ALIGN, Chunk, FieldPlace, Subgroup, Unit, align

LARGEST_NUMEL = 4 * 2**20
# With a device and no disk: with small records, the device would idle while Python handles them.
LARGEST_IN_MEMORY = 16 * 2**20
SMALLEST_NUMEL = 64 * 2**10


class StateField(Protocol):
    """A field of the optimizer state, with one value per parameter element or block of them."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def block(self) -> int:
        """The number of parameter elements that share one stored element.

        0 for a value of the parameter as a whole.
        """
        ...

    def elements(self, numel: int) -> int:
        """Return the stored elements for ``numel`` parameter elements (fewer for block scales)."""
        ...


class UpdateWork(NamedTuple):
    """The work of one update of a parameter; see ``Subgroup``."""

    flops: int = 0
    moved_bytes: int = 0
    matrix: bool = False


FieldsOf = Callable[[Chunk], Sequence[StateField]]
WorkOf = Callable[[Chunk], UpdateWork | None]  # ``None``: a kernel with a measured rate runs it


def _record(fields: Sequence[StateField], count: int) -> tuple[tuple[FieldPlace, ...], int]:
    places: list[FieldPlace] = []
    offset = 0
    for field in fields:
        numel = field.elements(count)
        places.append(FieldPlace(field.name, field.dtype, offset, numel, field.block))
        offset = align(offset + numel * field.dtype.itemsize, PARAM_ALIGN)
    return tuple(places), align(max(offset, 1), PAGE)  # a rule without state has one page


def cut_subgroups(
    units: Sequence[Unit], fields_of: FieldsOf, numel: int, work_of: WorkOf = lambda chunk: None
) -> tuple[tuple[Subgroup, ...], ...]:
    """Return the subgroups of every unit, with at most ``numel`` elements each.

    Subgroups are numbered over the whole model.  ``numel`` must be a multiple of every field's
    block.  Chunks that are updated as a whole are not cut.
    """
    index = 0
    result: list[tuple[Subgroup, ...]] = []
    for unit in units:
        mine: list[Subgroup] = []
        for number, chunk in enumerate(unit.chunks):
            if chunk.group is None:
                continue
            fields, work = fields_of(chunk), work_of(chunk) or UpdateWork()
            most = chunk.numel if chunk.whole else numel
            records = {
                count: _record(fields, count)
                for count in {min(most, chunk.numel), chunk.numel % most}
                if count
            }
            for start in range(0, chunk.numel, most):
                count = min(most, chunk.numel - start)
                places, nbytes = records[count]
                mine.append(
                    Subgroup(index, unit.index, number, start, count, places, nbytes, *work)
                )
                index += 1
        result.append(tuple(mine))
    return tuple(result)


def bytes_per_element(units: Sequence[Unit], fields_of: FieldsOf) -> float:
    """Return the most bytes of state record per element among the trained chunks of the units."""
    worst = 0.0
    for unit in units:
        for chunk in unit.chunks:
            if chunk.group is not None:
                fields = fields_of(chunk)
                count = chunk.numel if chunk.whole else 2**16
                worst = max(worst, _record(fields, count)[1] / count)
    return worst


def choose_numel(
    record_bytes: float, room_bytes: int, slots: int, largest: int | None = None
) -> int:
    """Return the elements of the largest subgroup of which ``slots`` records fit in ``room_bytes``.

    Args:
        record_bytes: bytes of a record per element.
        largest: upper limit; default ``LARGEST_NUMEL``.  The lower limit is ``SMALLEST_NUMEL``.
    """
    numel = largest or LARGEST_NUMEL
    while numel > SMALLEST_NUMEL and numel * record_bytes * slots > room_bytes:
        numel //= 2
    return numel
