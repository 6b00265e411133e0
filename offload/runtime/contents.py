"""What is in a unit's weights and records, by parameter: filled, read and edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ..optim import Noise, join_master, read_moment, split_master, write_moment
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.messages import Item, Kind
from ..schedule.partition import Chunk, ParamSpec
from ..schedule.subgroups import Subgroup
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
    ) -> bool:
        """Writes weights, masters and state of a unit's parameters; whether all that it wrote is
        finite (where something was there before; else nobody asks).

        ``value_of`` gives the tensors of a parameter (``weight`` in any float dtype; moments in
        fp32, which are stored in their format), or ``None`` to leave it as it is.  ``first``:
        nothing was there before.
        """
        item, finite = Item(Kind.WEIGHTS, unit), True
        place = self._direct.place(item) if first else self._direct.load(item)
        if first:
            self._arenas.bytes_of(place).zero_()
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
            fields: dict[str, torch.Tensor] = {}
            names = {
                field.name
                for subgroup in self._layout.subgroups[unit]
                if subgroup.chunk == number
                for field in subgroup.fields
            }
            touched: list[ParamSpec] = []
            for spec in chunk.params:
                values = value_of(spec)
                if values is not None:
                    self._fill_param(chunk, spec, values, flat, fields, names, first=first)
                    touched.append(spec)
                    if not first:
                        span = slice(spec.offset, spec.offset + spec.numel)
                        new = (flat, *(fields[name] for name in fields))
                        finite &= all(bool(part[span].isfinite().all()) for part in new)
            if chunk.group is not None and touched:
                self._fill_state(unit, number, fields, touched, first=first)
        self._direct.store(item, first=first)
        return finite

    def _fill_param(
        self, chunk: Chunk, spec: ParamSpec, values: Values, flat: torch.Tensor,
        fields: dict[str, torch.Tensor], names: set[str], *, first: bool,
    ) -> None:  # fmt: skip
        """``fields`` collects what goes to the records, which have ``names``; zeroes only where
        something was before."""
        span = slice(spec.offset, spec.offset + spec.numel)
        kept = chunk.group is not None and chunk.dtype != torch.float32
        for name, value in values.items():
            if name == "weight" and not kept:
                flat[span].copy_(flat_like(spec, value, chunk.dtype))
                continue
            if name == "weight":
                stored = self._fill_weight(chunk, spec, value, flat[span], names, first=first)
            else:
                stored = {name: flat_like(spec, value, torch.float32)}
            for field, part in stored.items():
                if field in fields or not first or part.any():
                    if field not in fields:
                        fields[field] = part.new_zeros(chunk.numel)
                    fields[field][span] = part

    @staticmethod
    def _fill_weight(
        chunk: Chunk, spec: ParamSpec, value: torch.Tensor, weight: torch.Tensor,
        names: set[str], *, first: bool,
    ) -> Values:  # fmt: skip
        """Writes a weight that has a master; returns what the master's record gets."""
        if value.dtype == chunk.dtype == torch.bfloat16 and "master" not in names:
            weight.copy_(flat_like(spec, value, chunk.dtype))
            return {} if first else {"master_lo": weight.new_zeros(weight.shape, dtype=torch.int16)}
        master = flat_like(spec, value, torch.float32)
        if chunk.dtype != torch.bfloat16:
            weight.copy_(master.to(chunk.dtype))
            return {"master": master}
        high, low = split_master(master)
        weight.copy_(high)
        return {"master": master} if "master" in names else {"master_lo": low}

    def _fill_state(
        self,
        unit: int,
        number: int,
        fields: Mapping[str, torch.Tensor],
        touched: list[ParamSpec],
        *,
        first: bool,
    ) -> None:
        for subgroup in self._layout.subgroups[unit]:
            if subgroup.chunk != number:
                continue
            wanted = {field.name for field in subgroup.fields} & set(fields)
            item = Item(Kind.STATE, subgroup.index)
            if first and not wanted:
                if not self._direct.starts_clear(subgroup.index):
                    self._arenas.bytes_of(self._direct.place(item)).zero_()
                continue
            place = self._direct.place(item) if first else self._direct.load(item)
            if first:
                self._arenas.bytes_of(place).zero_()
            record = self._record(place, subgroup)
            for spec in touched:
                self._fill_record(subgroup, record, spec, fields)
            for field in subgroup.fields:
                target = self._arenas.typed(place, field.offset, field.dtype, field.numel)
                target.copy_(record[field.name])
            self._direct.store(item, first=first)

    @staticmethod
    def _fill_record(
        subgroup: Subgroup,
        record: Mapping[str, torch.Tensor],
        spec: ParamSpec,
        fields: Mapping[str, torch.Tensor],
    ) -> None:
        """Stores one parameter's part of a subgroup; what ``fields`` lacks stays as it is."""
        part = _part(subgroup, record, spec)
        if part is None:
            return
        low, stored = part
        moments = [f.name for f in subgroup.fields if f.name not in MASTERS and f.block == 1]
        for name in stored.keys() & fields.keys():
            numel = stored[name].numel()
            value = fields[name][low : low + numel]
            if name in MASTERS:
                stored[name].copy_(value)
            else:
                noise = Noise(low - spec.offset, moments.index(name), 0)
                write_moment(value, stored, name, noise)

    def _record(self, place: Place, subgroup: Subgroup) -> dict[str, torch.Tensor]:
        """A copy of a record's fields, by name, on the CPU."""
        return {
            f.name: self._arenas.typed(place, f.offset, f.dtype, f.numel).cpu().clone()
            for f in subgroup.fields
        }

    # -- reading --------------------------------------------------------------------------------

    def is_finite(self, unit: int) -> bool:
        """Whether all weights, masters and moments of a unit are."""
        place = self._direct.load(Item(Kind.WEIGHTS, unit))
        for chunk in self._layout.units[unit].chunks:
            flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
            for spec in chunk.params:
                if not flat[spec.offset : spec.offset + spec.numel].isfinite().all():
                    return False
        moments = (value for _, values in self.state(unit) for value in values.values())
        masters = (value for _, value in self.masters(unit))
        return all(bool(value.isfinite().all()) for value in (*masters, *moments))

    def state(self, unit: int) -> Iterator[tuple[ParamSpec, dict[str, torch.Tensor]]]:
        """The moments of every trained parameter of a unit, fp32 whatever their format.

        Masters are left out: ``masters`` gives them.
        """
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            if chunk.group is None:
                continue
            moments = self._gather(unit, number, chunk, masters=False)
            for spec in chunk.params:
                yield (
                    spec,
                    {
                        name: flat[spec.offset : spec.offset + spec.numel]
                        .clone()
                        .as_strided(spec.shape, spec.stride)
                        for name, flat in moments.items()
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
            fields = self._gather(unit, number, chunk, masters=True)
            if "master_lo" in fields:
                exact = join_master(weights, fields["master_lo"])
            else:
                exact = fields.get("master", weights.float())
            for spec in chunk.params:
                value = exact[spec.offset : spec.offset + spec.numel].clone()
                yield spec, value.as_strided(spec.shape, spec.stride)

    def _gather(
        self, unit: int, number: int, chunk: Chunk, *, masters: bool
    ) -> dict[str, torch.Tensor]:
        """By name, a chunk's masters as they are stored, or its moments in fp32."""
        gathered: dict[str, torch.Tensor] = {}
        for subgroup in self._layout.subgroups[unit]:
            names = [
                f.name for f in subgroup.fields if (f.name in MASTERS) == masters and f.block == 1
            ]
            if subgroup.chunk != number or not names:
                continue
            record = self._record(self._direct.load(Item(Kind.STATE, subgroup.index)), subgroup)
            for name in names:
                dtype = record[name].dtype if masters else torch.float32
                whole = gathered.setdefault(name, torch.zeros(chunk.numel, dtype=dtype))
                span = slice(subgroup.start, subgroup.start + subgroup.count)
                whole[span] = record[name] if masters else read_moment(record, name)
        return gathered


def _part(
    subgroup: Subgroup, record: Mapping[str, torch.Tensor], spec: ParamSpec
) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Where in the chunk a subgroup's part of a parameter starts, and its fields; ``None`` if the
    parameter does not reach into it."""
    low = max(spec.offset, subgroup.start)
    high = min(spec.offset + spec.numel, subgroup.start + subgroup.count)
    if low >= high:
        return None
    inside = (low - subgroup.start, high - subgroup.start)
    return low, {f.name: record[f.name][f.span(*inside)] for f in subgroup.fields}
