"""The values in a unit's weights and optimizer records: load, read and edit them by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from functools import partial

import torch

from ..facts.tier import Tier
from ..io_engine import allocate_host
from ..movement.direct import DirectAccess
from ..movement.page_conversion import pack_param, unpack_param, unpack_unit
from ..movement.pools import Arenas
from ..optim import Noise
from ..optim.formats import join_master, round_to_upper
from ..optim.kernels import write_split_master
from ..optim.norm import sum_of_squares
from ..optim.reference import load_moment, read_moment
from ..optim.streamed import RECORD
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.messages import Key, Kind
from ..schedule.units import Chunk, ParamSpec, Subgroup, Unit
from .exact_masters import (
    BEFORE,
    MASTERS,
    any_nonzero,
    flat_like,
    keep_masters,
    rounded,
    value_before,
    warn_if_lost,
)

Values = Mapping[str, torch.Tensor]  # one parameter's tensors by name: "weight", "exp_avg", ...
EditedParts = Mapping[
    int, Collection[int]
]  # by unit: the parameters whose weights are edited, or STATE for optimizer state
STATE = -1


def is_finite(value: torch.Tensor) -> bool:
    """Return whether every element is finite."""
    if not value.is_floating_point():
        return True
    if value.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return math.isfinite(sum_of_squares(value.reshape(-1)))  # one pass, without a temporary
    return bool(value.double().isfinite().all())


class Contents:
    """Moves values between plain tensors and the tiers that hold them.

    The caller ensures that no transfer or update runs meanwhile.
    """

    def __init__(
        self, layout: Layout, arenas: Arenas, direct: DirectAccess, *, fills_shared: bool = True
    ) -> None:
        """
        Args:
            fills_shared: whether this rank reads weights to places that ranks share.
        """
        self._fills_shared = fills_shared
        self._layout, self._arenas, self._direct = layout, arenas, direct
        self._read: tuple[int, torch.Tensor] | None = None  # a unit, and its bytes, read asleep

    # -- writing --------------------------------------------------------------------------------

    def show_in_place(self, unit: int) -> None:
        """Read a unit from the files of ``weights=`` now, if it has a fixed place in memory.

        A place that ranks share is filled by one of them.
        """
        if unit in self._layout.shared_places and not self._fills_shared:
            return
        if self._layout.homes[unit].stays:
            self._direct.reload(Key(Kind.WEIGHTS, unit))

    def load(
        self, unit: int, value_of: Callable[[ParamSpec], Values | None], *, first: bool,
        unknown: Container[int] = (),
    ) -> bool:  # fmt: skip
        """Write weights, masters and state of a unit's parameters.

        See Note [Exact masters] in ``exact_masters.py``.

        Args:
            unit: its index.
            value_of: returns the tensors of a parameter (``weight`` in any float dtype; moments in
                fp32, which are stored in their format), or ``None`` to leave it unchanged. Under
                ``BEFORE``: the old value of a weight whose memory already holds the new one.
            first: whether this is the first write.
            unknown: parameters that their modules changed in place, whose old values were not kept.

        Returns:
            Whether all trained values that it wrote are finite.
        """
        if self._layout.units[unit].packed:
            assert first, "what is packed is not changed"
            self.load_page(unit, partial(self._pack, self._layout.units[unit], value_of))
            return True
        item, finite = Key(Kind.WEIGHTS, unit), True
        place = self._direct.place(item) if first else self._direct.bring(item)
        if first:
            self._arenas.bytes_of(place).zero_()
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
            fields: dict[int, dict[str, torch.Tensor]] = {}  # by parameter, what goes to records
            names = {
                field.name
                for subgroup in self._layout.subgroups[unit]
                if subgroup.chunk == number
                for field in subgroup.fields
            }
            keeps = not first and chunk.group is not None and chunk.dtype != torch.float32
            masters: dict[str, torch.Tensor] = {}  # before this write
            for spec in chunk.params:
                values = value_of(spec)
                if values is None:
                    continue
                weight = flat[spec.offset : spec.offset + spec.numel]
                before = value_before(spec, chunk, values, weight) if keeps else None
                new = self._load_param(chunk, spec, values, weight, names, first=first)
                given = values.get("weight")  # a value in another dtype becomes the master itself
                if before is not None and given is not None and given.dtype == before.dtype:
                    masters = masters or self._gather(unit, number, chunk, masters=True)
                    same = rounded(spec, masters, before).eq(weight.cpu())
                    if spec.index in unknown:
                        warn_if_lost(spec, masters, same)
                    keep_masters(spec, masters, same, new, weight.cpu())
                if chunk.group is not None:
                    finite &= all(is_finite(part) for part in (weight, *new.values()))
                    fields[spec.index] = new
            if fields:
                self._load_state(unit, number, fields, first=first)
        self._direct.store(item, first=first)
        return finite

    def load_page(self, unit: int, fill: Callable[[torch.Tensor], None]) -> None:
        """Write a packed unit for the first time; ``fill`` fills its page, in host memory."""
        item, each = Key(Kind.WEIGHTS, unit), self._layout.units[unit]
        place = self._direct.place(item)
        page = target = self._arenas.bytes_of(place)
        if place.tier is Tier.DEVICE:
            page = torch.from_numpy(allocate_host(each.page_bytes).array)
        page.zero_()
        fill(page)
        if page is not target and self._in_page(each):
            target.copy_(page)
        elif page is not target:
            unpack_unit(each, page.to(target.device), target)
        self._direct.store(item, first=True)

    def _pack(
        self, unit: Unit, value_of: Callable[[ParamSpec], Values | None], page: torch.Tensor
    ) -> None:
        for (chunk, spec), part in zip(unit.params, unit.page, strict=True):
            values = value_of(spec)
            assert values is not None
            pack_param(chunk, spec, part, page, flat_like(spec, values["weight"], chunk.dtype))

    def _in_page(self, unit: Unit) -> bool:
        """Return whether a unit's weights are stored packed.

        Packed units whose weights live on the device are unpacked there when they are loaded.
        """
        return unit.packed and self._layout.homes[unit.index].weights is not Tier.DEVICE

    def _load_param(
        self, chunk: Chunk, spec: ParamSpec, values: Values, weight: torch.Tensor,
        names: set[str], *, first: bool,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Write a parameter's weight; return what goes to its records, whose fields are ``names``.

        On the first write, all-zero fields are left out, because new records are zero.
        """
        kept = chunk.group is not None and chunk.dtype != torch.float32
        fields: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            if name == BEFORE:
                continue
            if name == "weight" and not kept:
                weight.copy_(flat_like(spec, value, chunk.dtype))
                continue
            if name == "weight":
                stored = self._load_weight(chunk, spec, value, weight, names, first=first)
            elif name == RECORD:
                stored = {name: value}
            else:
                stored = {name: flat_like(spec, value, torch.float32)}
            fields.update({k: part for k, part in stored.items() if not first or any_nonzero(part)})
        return fields

    @staticmethod
    def _load_weight(
        chunk: Chunk, spec: ParamSpec, value: torch.Tensor, weight: torch.Tensor,
        names: set[str], *, first: bool,
    ) -> Values:  # fmt: skip
        """Write a weight that has a master; return the fields for the master's record."""
        if value.dtype == chunk.dtype == torch.bfloat16 and "master" not in names:
            weight.copy_(flat_like(spec, value, chunk.dtype))
            return (
                {}
                if first
                else {"master_lo": torch.zeros(weight.shape, dtype=torch.int16, device="cpu")}
            )
        master = flat_like(spec, value, torch.float32)
        if chunk.dtype != torch.bfloat16:
            weight.copy_(master.to(chunk.dtype))
            return {"master": master}
        if "master" in names:
            weight.copy_(round_to_upper(master))
            return {"master": master}
        low = torch.empty(spec.numel, dtype=torch.int16, device="cpu")
        write_split_master(master, weight, low)
        return {"master_lo": low}

    def _load_state(
        self, unit: int, number: int, fields: Mapping[int, Mapping[str, torch.Tensor]], *,
        first: bool,
    ) -> None:  # fmt: skip
        """Write record fields of a chunk's parameters, by index; other fields stay unchanged."""
        given = {name for parts in fields.values() for name in parts}
        specs = [spec for spec in self._layout.units[unit].chunks[number].params
                 if spec.index in fields]  # fmt: skip
        for subgroup in self._layout.subgroups[unit]:
            if subgroup.chunk != number:
                continue
            wanted = {field.name for field in subgroup.fields} & given
            item = Key(Kind.STATE, subgroup.index)
            if first and not wanted:
                if not self._direct.starts_clear(subgroup.index):
                    self._arenas.bytes_of(self._direct.place(item)).zero_()
                continue
            place = self._direct.place(item) if first else self._direct.bring(item)
            if first:
                self._arenas.bytes_of(place).zero_()
            # Later ones in a copy, so that an exception does not leave a part of them.
            direct = first and place.tier is Tier.HOST
            record = self._fields(place, subgroup) if direct else self._record(place, subgroup)
            for spec in specs:
                self._load_record(subgroup, record, spec, fields[spec.index])
            if not direct:
                for name, target in self._fields(place, subgroup).items():
                    target.copy_(record[name])
            self._direct.store(item, first=first)

    @staticmethod
    def _load_record(
        subgroup: Subgroup,
        record: Mapping[str, torch.Tensor],
        spec: ParamSpec,
        fields: Mapping[str, torch.Tensor],
    ) -> None:
        """Write one parameter's part of a subgroup; fields not in ``fields`` stay unchanged."""
        part = _part(subgroup, record, spec)
        if part is None:
            return
        low, stored = part
        moments = [f.name for f in subgroup.fields if f.name not in MASTERS and f.block == 1]
        if RECORD in stored and RECORD in fields:
            stored[RECORD].copy_(fields[RECORD])
        for name in (stored.keys() & fields.keys()) - {RECORD}:
            start, numel = low - spec.offset, stored[name].numel()
            value = fields[name][start : start + numel]
            if name in MASTERS:
                stored[name].copy_(value)
            else:
                load_moment(value, stored, name, Noise(start, moments.index(name), 0))

    def _record(self, place: Place, subgroup: Subgroup) -> dict[str, torch.Tensor]:
        """Return copies of a record's fields on the CPU, by name."""
        return {name: t.cpu().clone() for name, t in self._fields(place, subgroup).items()}

    def _fields(self, place: Place, subgroup: Subgroup) -> dict[str, torch.Tensor]:
        typed = self._arenas.typed
        return {f.name: typed(place, f.offset, f.dtype, f.numel) for f in subgroup.fields}

    # -- reading --------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether memory is freed, so that weights are read without being onloaded."""
        return self._arenas.read_freed is not None

    def wake(self) -> None:
        """Allocate memory again that is freed."""
        self._direct.finish()

    def read_param_asleep(self, unit: int, index: int) -> torch.Tensor:
        """Return a copy of a parameter's weight on the CPU, and cache the bytes of its unit."""
        if self._read is None or self._read[0] != unit:
            self._read = None
            self._read = unit, self._direct.read_item_asleep(Key(Kind.WEIGHTS, unit))
        memory, each = self._read[1], self._layout.units[unit]
        for number, (chunk, spec) in enumerate(each.params):
            if spec.index != index:
                continue
            value = torch.empty(spec.numel, dtype=chunk.dtype, device="cpu")
            if self._in_page(each):
                unpack_param(each.page[number], memory, value)
            else:
                first = chunk.byte_offset + spec.offset * chunk.dtype.itemsize
                value.copy_(memory.narrow(0, first, value.nbytes).view(chunk.dtype))
            return spec.shaped(value)
        raise KeyError(index)

    def drop_cached_unit(self) -> None:
        """Drop the unit that ``read_param_asleep`` has cached."""
        self._read = None

    detach_memory = memory_freed = attach_memory = drop_cached_unit  # see MemoryUser

    def is_finite(self, unit: int) -> bool:
        """Return whether all trained weights, masters and moments of a unit are finite."""
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            if chunk.group is None:
                continue
            flat = self._weights(unit, chunk)
            values = [flat[p.offset : p.offset + p.numel] for p in chunk.params]
            for of_one in self.stored(unit, number).values():
                values += of_one.values()
            if not all(map(is_finite, values)):
                return False
        return True

    def stored(self, unit: int, number: int) -> dict[int, dict[str, torch.Tensor]]:
        """Return what is stored for a trained chunk, by parameter index.

        That is the moments in fp32, and the exact fp32 ``master`` if it is not the weight itself;
        for a parameter that is updated as a whole by a streamed optimizer, its ``record``.
        """
        chunk = self._layout.units[unit].chunks[number]
        flats = self._gather(unit, number, chunk, masters=False)
        exact = self._exact(unit, number, chunk)
        if exact is not None:
            flats["master"] = exact
        found = {
            spec.index: {
                name: spec.shaped(flat[spec.offset : spec.offset + spec.numel].clone())
                for name, flat in flats.items()
            }
            for spec in chunk.params
        }
        for subgroup in self._layout.subgroups[unit]:
            if subgroup.chunk == number and any(f.name == RECORD for f in subgroup.fields):
                place = self._direct.bring(Key(Kind.STATE, subgroup.index))
                found[chunk.params[0].index][RECORD] = self._record(place, subgroup)[RECORD]
        return found

    def has_master(self, unit: int, number: int) -> bool:
        """Return whether the weights of a chunk have separate masters."""
        records = [r for r in self._layout.subgroups[unit] if r.chunk == number]
        return any(f.name in MASTERS for record in records for f in record.fields)

    def masters(self, unit: int) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield the exact fp32 value of every trained parameter of a unit."""
        for number, chunk in enumerate(self._layout.units[unit].chunks):
            if chunk.group is None:
                continue
            exact = self._exact(unit, number, chunk)
            if exact is None:
                exact = self._weights(unit, chunk).float()
            for spec in chunk.params:
                yield spec, spec.shaped(exact[spec.offset : spec.offset + spec.numel].clone())

    def _weights(self, unit: int, chunk: Chunk) -> torch.Tensor:
        place = self._direct.bring(Key(Kind.WEIGHTS, unit))
        flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
        return flat.cpu().clone()

    def _exact(self, unit: int, number: int, chunk: Chunk) -> torch.Tensor | None:
        """Return the masters of a chunk, flat; ``None`` if the weights are the masters."""
        if not self.has_master(unit, number):
            return None
        fields = self._gather(unit, number, chunk, masters=True)
        if "master_lo" in fields:
            return join_master(self._weights(unit, chunk), fields["master_lo"])
        return fields["master"]

    def exact(self, unit: int) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield the exact value of every parameter of a unit: its master, else its weight."""
        yield from self.masters(unit)
        place = self._direct.bring(Key(Kind.WEIGHTS, unit))
        each = self._layout.units[unit]
        if self._in_page(each):
            page = self._arenas.bytes_of(place).cpu()
            for (chunk, spec), part in zip(each.params, each.page, strict=True):
                value = torch.empty(spec.numel, dtype=chunk.dtype, device="cpu")
                unpack_param(part, page, value)
                yield spec, spec.shaped(value)
            return
        for chunk in each.chunks:
            if chunk.group is None:
                flat = self._arenas.typed(place, chunk.byte_offset, chunk.dtype, chunk.numel)
                for spec in chunk.params:
                    value = flat[spec.offset : spec.offset + spec.numel].cpu().clone()
                    yield spec, spec.shaped(value)

    def _gather(
        self, unit: int, number: int, chunk: Chunk, *, masters: bool
    ) -> dict[str, torch.Tensor]:
        """Return a chunk's masters as they are stored, or its moments in fp32, by name."""
        gathered: dict[str, torch.Tensor] = {}
        for subgroup in self._layout.subgroups[unit]:
            names = [
                f.name for f in subgroup.fields if (f.name in MASTERS) == masters and f.block == 1
            ]
            if subgroup.chunk != number or not names:
                continue
            record = self._record(self._direct.bring(Key(Kind.STATE, subgroup.index)), subgroup)
            for name in names:
                dtype = record[name].dtype if masters else torch.float32
                whole = gathered.setdefault(
                    name, torch.zeros(chunk.numel, dtype=dtype, device="cpu")
                )
                span = slice(subgroup.start, subgroup.start + subgroup.count)
                whole[span] = record[name] if masters else read_moment(record, name)
        return gathered


def values_by_spec(
    values: Mapping[int, torch.Tensor], before: Mapping[int, torch.Tensor | None]
) -> Callable[[ParamSpec], Values | None]:
    """Return the function that gives ``Contents.load`` these weights, by parameter index."""

    def value_of(spec: ParamSpec) -> Values | None:
        value, was = values.get(spec.index), before.get(spec.index)
        if value is None:
            return None
        return {"weight": value} if was is None else {"weight": value, BEFORE: was}

    return value_of


def _part(
    subgroup: Subgroup, record: Mapping[str, torch.Tensor], spec: ParamSpec
) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return where a subgroup's part of a parameter starts in the chunk, and its fields.

    ``None`` if the subgroup does not contain any of the parameter.
    """
    low = max(spec.offset, subgroup.start)
    high = min(spec.offset + spec.numel, subgroup.start + subgroup.count)
    if low >= high:
        return None
    inside = (low - subgroup.start, high - subgroup.start)
    return low, {f.name: record[f.name][f.span(*inside)] for f in subgroup.fields}
