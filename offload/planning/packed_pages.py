"""The choice of frozen weights that are stored packed, and the layout of their pages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..optim.kernels import FLOAT_TYPES
from ..optim.packed_layout import BORDER, Format, Parts
from ..quantised.format_table import described_page
from ..schedule.units import PAGE, PagePart, Unit, align
from .partition import Partition
from .stand_ins import held_parameters, whole_model

_LEFT_OUT = (
    nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
LEAST = 64  # rows and columns; smaller matrices (gates, position tables) are not packed


def with_pages(
    model: nn.Module, parts: Partition, form: Format, kept: Container[nn.Parameter]
) -> Partition:
    """Return ``parts`` with the matrices of frozen units packed, including stacks of matrices.

    As in QLoRA, embeddings, the head that computes logits, convolutions, norms and biases are not
    packed.  Neither are complex and fp64 parameters.

    Args:
        form: the format.
        kept: further parameters that are not packed.

    Raises:
        ValueError: a matrix is in an 8-bit float format already.
    """
    if not parts.found:
        return parts
    packable = _packable(whole_model(model), parts.found[-1].module)
    wanted = {p for p in held_parameters(model, packable) if p not in kept}
    units = tuple(
        unit if unit.trainable or unit.encloses else _packed(unit, parts.parameters, form, wanted)
        for unit in parts.units
    )
    return replace(parts, units=units)


def with_described_pages(parts: Partition, described: Sequence[Mapping[str, Any]]) -> Partition:
    """Return ``parts`` with the pages of a store's units that were quantised in the user's files.

    Args:
        described: the units of the store; see ``describe_units``.
    """
    if len(described) != len(parts.units):
        return parts  # the store is that of another model, as a later check says
    units = tuple(map(_with_described_page, parts.units, described))
    return replace(parts, units=units)


def _with_described_page(unit: Unit, described: Mapping[str, Any]) -> Unit:
    page = described.get("page", ())
    if unit.trainable or not any(isinstance(form, list) for form, _, _ in page):
        return unit
    parts = tuple(
        PagePart(None if form is None else described_page(form), offset, nbytes)
        for form, offset, nbytes in page
    )
    return replace(unit, page=parts, page_bytes=described["weight_bytes"])


def _packable(model: nn.Module, head: nn.Module) -> frozenset[nn.Parameter]:
    left_out: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, _LEFT_OUT):
            left_out.update(module.parameters(recurse=False))
    for module in _heads(model, head):
        left_out.update(module.parameters())
    return frozenset(p for p in model.parameters() if p not in left_out and _is_matrix(p))


def _heads(model: nn.Module, last: nn.Module) -> Iterable[nn.Module]:
    if isinstance(last, nn.Linear):
        yield last
    for module in model.modules():  # the model may be wrapped in other modules, for example by peft
        named = getattr(module, "get_output_embeddings", None)
        found = named() if callable(named) else None
        if isinstance(found, nn.Module):
            yield found


def _is_matrix(p: nn.Parameter) -> bool:
    if p.dim() not in (2, 3) or min(p.shape[-2:]) < LEAST or (p.dim() == 3 and p.shape[0] == 1):
        return False
    dense = torch.empty(p.shape, device="meta").stride()
    return p.is_floating_point() and p.stride() == dense


def _packed(
    unit: Unit, parameters: Sequence[nn.Parameter], form: Format,
    wanted: Container[nn.Parameter],
) -> Unit:  # fmt: skip
    parts: list[PagePart] = []
    offset = 0
    for chunk, spec in unit.params:
        packs = parameters[spec.index] in wanted and chunk.dtype in FLOAT_TYPES
        if parameters[spec.index] in wanted and chunk.dtype.itemsize == 1:
            raise ValueError(
                f"frozen={form!r} cannot pack {spec.name!r}, which is quantised already "
                f"({chunk.dtype}); leave frozen= out, and such weights move as they are"
            )
        packed = Parts(form, spec.shape) if packs else None
        nbytes = spec.numel * chunk.dtype.itemsize if packed is None else packed.nbytes
        parts.append(PagePart(packed, offset, nbytes))
        offset += align(nbytes, BORDER)
    if all(part.form is None for part in parts):
        return unit
    return replace(unit, page=tuple(parts), page_bytes=align(offset, PAGE))
