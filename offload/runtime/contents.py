"""What is in a unit's weights and records, by parameter: filled, read and edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ..optim import join_master, split_master
from ..schedule.layout import Layout
from ..schedule.messages import Item, Kind
from ..schedule.partition import Chunk, ParamSpec
from .direct import DirectAccess
from .pools import Arenas

Values = Mapping[str, torch.Tensor]  # one parameter's tensors by name: "weight", "exp_avg", ...
MASTERS = ("master", "master_lo")


def flat_like(spec: ParamSpec, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` flat in the memory order of the parameter, on the CPU."""
    flat = torch.empty(spec.numel, dtype=dtype)
    flat.as_strided(spec.shape, spec.stride).copy_(value)
    return flat


class Contents:
    """Moves values between plain tensors and their homes.  Nothing else may run meanwhile."""

    def __init__(self, layout: Layout, arenas: Arenas, direct: DirectAccess) -> None:
        self._layout, self._arenas, self._direct = layout, arenas, direct

    # -- writing --------------------------------------------------------------------------------

    def fill(
        self, unit: int, value_of: Callable[[ParamSpec], Values | None], *, first: bool
    ) -> None:
        """Writes weights, masters and state of a unit's parameters.

        ``value_of`` gives the tensors of a parameter (``weight`` in any float dtype; state in
        fp32), or ``None`` to leave it as it is.  ``first``: nothing was there before.
        """
        item = Item(Kind.WEIGHTS, unit)
        place = self._direct.place(item) if first else self._direct.load(item)
        if first:
            self._arenas.bytes_of(place).zero_()
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
            fields: dict[str, torch.Tensor] = {}
            touched: list[tuple[int, int]] = []
            for spec in chunk.params:
                values = value_of(spec)
                if values is not None:
                    self._fill_param(chunk, spec, values, flat, fields)
                    touched.append((spec.offset, spec.offset + spec.numel))
            if chunk.group is not None and touched:
                self._fill_state(unit, number, fields, touched, first=first)
        self._direct.store(item, first=first)

    def _fill_param(
        self, chunk: Chunk, spec: ParamSpec, values: Values, flat: torch.Tensor,
        fields: dict[str, torch.Tensor],
    ) -> None:  # fmt: skip
        span = slice(spec.offset, spec.offset + spec.numel)
        kept = chunk.group is not None and chunk.dtype != torch.float32
        for name, value in values.items():
            if name == "weight" and not kept:
                flat[span].copy_(flat_like(spec, value, chunk.dtype))
            elif name == "weight":
                master = flat_like(spec, value, torch.float32)
                high, low = split_master(master)
                exact = chunk.dtype == torch.bfloat16
                flat[span].copy_(high if exact else master.to(chunk.dtype))
                self._into(fields, "master", master, chunk, span)
                self._into(fields, "master_lo", low, chunk, span)
            else:
                self._into(fields, name, flat_like(spec, value, torch.float32), chunk, span)

    @staticmethod
    def _into(
        fields: dict[str, torch.Tensor], name: str, value: torch.Tensor, chunk: Chunk, span: slice
    ) -> None:
        if name not in fields:
            if not value.any():
                return
            fields[name] = torch.zeros(chunk.numel, dtype=value.dtype)
        fields[name][span] = value

    def _fill_state(
        self,
        unit: int,
        number: int,
        fields: Mapping[str, torch.Tensor],
        touched: list[tuple[int, int]],
        *,
        first: bool,
    ) -> None:
        for subgroup in self._layout.subgroups[unit]:
            if subgroup.chunk != number:
                continue
            wanted = {field.name for field in subgroup.fields} & set(fields)
            if first and not wanted and self._direct.starts_clear(subgroup.index):
                continue
            item = Item(Kind.STATE, subgroup.index)
            place = self._direct.place(item) if first else self._direct.load(item)
            if first:
                self._arenas.bytes_of(place).zero_()
            end = subgroup.start + subgroup.count
            for field in subgroup.fields:
                target = self._arenas.typed(place, field.offset, field.dtype, field.numel)
                whole = target.cpu().clone()
                for low, high in touched:
                    low, high = max(low, subgroup.start), min(high, end)
                    if low < high and (first or field.name in wanted or field.name in MASTERS):
                        source = fields.get(field.name)
                        inside = slice(low - subgroup.start, high - subgroup.start)
                        whole[inside] = 0 if source is None else source[low:high]
                target.copy_(whole)
            self._direct.store(item, first=first)

    # -- reading --------------------------------------------------------------------------------

    def state(self, unit: int) -> Iterator[tuple[ParamSpec, dict[str, torch.Tensor]]]:
        """The optimizer state of every trained parameter of a unit, fp32, as plain tensors.

        Masters are left out: ``masters`` gives them.
        """
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            if chunk.group is None:
                continue
            fields = self._gather(unit, number, chunk, lambda name: name not in MASTERS)
            for spec in chunk.params:
                span = slice(spec.offset, spec.offset + spec.numel)
                yield (
                    spec,
                    {
                        name: flat[span].clone().as_strided(spec.shape, spec.stride)
                        for name, flat in fields.items()
                    },
                )

    def masters(self, unit: int) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """The exact fp32 value of every trained parameter of a unit."""
        place = self._direct.load(Item(Kind.WEIGHTS, unit))
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            if chunk.group is None:
                continue
            flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
            weights = flat.cpu().clone()
            fields = self._gather(unit, number, chunk, lambda name: name in MASTERS)
            if "master_lo" in fields:
                exact = join_master(weights, fields["master_lo"])
            else:
                exact = fields.get("master", weights.float())
            for spec in chunk.params:
                value = exact[spec.offset : spec.offset + spec.numel].clone()
                yield spec, value.as_strided(spec.shape, spec.stride)

    def _gather(
        self, unit: int, number: int, chunk: Chunk, wanted: Callable[[str], bool]
    ) -> dict[str, torch.Tensor]:
        fields: dict[str, torch.Tensor] = {}
        for subgroup in self._layout.subgroups[unit]:
            if subgroup.chunk != number or not any(wanted(f.name) for f in subgroup.fields):
                continue
            place = self._direct.load(Item(Kind.STATE, subgroup.index))
            for field in subgroup.fields:
                if wanted(field.name):
                    at = self._arenas.typed(place, field.offset, field.dtype, field.numel)
                    part = at.cpu().clone()
                    whole = fields.setdefault(field.name, part.new_zeros(chunk.numel))
                    whole[subgroup.start : subgroup.start + subgroup.count] = part
        return fields
