"""Conversion of weights between a page, as a unit stores them, and a slot, as compute uses them."""

from __future__ import annotations

import torch

from ..optim import packed
from ..optim.packed_layout import Parts
from ..quantised.format_base import QuantisedPage
from ..schedule.units import Chunk, PagePart, ParamSpec, Unit


def unpack_unit(unit: Unit, page: torch.Tensor, slot: torch.Tensor) -> None:
    """Fill a slot from a page: both flat uint8, on one device."""
    for (chunk, spec), part in zip(unit.params, unit.page, strict=True):
        start = chunk.byte_offset + spec.offset * chunk.dtype.itemsize
        weight = slot.narrow(0, start, spec.numel * chunk.dtype.itemsize).view(chunk.dtype)
        unpack_param(part, page, weight)


def unpack_param(part: PagePart, page: torch.Tensor, weight: torch.Tensor) -> None:
    """Fill a parameter, flat, from its unit's page."""
    source = page.narrow(0, part.offset, part.nbytes)
    if part.form is None:
        weight.copy_(source.view(weight.dtype))
    elif isinstance(part.form, Parts):
        packed.unpack(part.form, source, weight)
    else:
        assert isinstance(part.form, QuantisedPage)
        part.form.unpack(source, weight)


def pack_param(
    chunk: Chunk, spec: ParamSpec, part: PagePart, page: torch.Tensor, flat: torch.Tensor
) -> None:
    """Store a parameter, flat and of its chunk's dtype, in its unit's page; on the CPU.

    Raises:
        ValueError: it is to be packed, and is not finite.
    """
    target = page.narrow(0, part.offset, part.nbytes)
    if part.form is None:
        target.view(chunk.dtype).copy_(flat)
        return
    assert isinstance(part.form, Parts), "weights that are quantised in files are read as they are"
    try:
        packed.pack(part.form, flat, target)
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}; leave frozen= out, or mend the weight") from None
