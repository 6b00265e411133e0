"""A store's commit as named tensors: weights unchanged, masters and moments in fp32."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import ExportError
from ..io_engine.committed import FoundStore
from ..io_engine.manifest import Generation
from ..io_engine.reading import StoreReader
from ..optim.formats import join_halves
from ..optim.reference import read_moment
from ..optim.state_record import HEADER, Slot, length_in, structure
from ..optim.streamed import RECORD
from ..state.module_states import named_tensors
from ..state.streamed_state import MASTER
from .in_place_weights import InPlaceReader
from .meta import decode_facts
from .tensors import PART_BYTES, Bytes, Part, StreamedTensor, bytes_of, in_memory, lazy
from .unpacked_weights import unpacked

MASTERS = ("master", "master_lo")
BLOCK = 256  # parts are aligned to blocks of compact moments
STEP = PART_BYTES // 4 // BLOCK * BLOCK  # elements in a part
Node = Mapping[str, Any]  # part of the store's description
# requests elements [start, stop); the result waits for them
Begin = Callable[[int, int], Callable[[], torch.Tensor]]


class StoreSource:
    """The contents of a generation, read in parts, so that no tensor is in memory as a whole."""

    def __init__(
        self,
        store: FoundStore,
        generation: Generation,
        weights: Path | Mapping[str, Path] | None = None,
    ) -> None:
        """
        Args:
            weights: the present folder of the files that the store reads weights from in place.
        """
        self.store, self.generation = store, generation
        self.reader = StoreReader(store, generation)
        self.units: list[Node] = list(store.layout.description["units"])
        self.facts: dict[str, Any] = decode_facts(generation.meta)
        try:
            self._files = InPlaceReader(
                store.layout.description, self.facts.get("digests", {}), weights
            )
        except BaseException:
            self.reader.close()
            raise

    def close(self) -> None:
        """Close the store's files."""
        self.reader.close()
        self._files.close()

    @property
    def in_place(self) -> set[str]:
        """The parameters whose weights are in files beside the store, by name."""
        units = [self.units[number] for number in self._files.units]
        return {p["name"] for unit in units for chunk in unit["chunks"] for p in chunk["params"]}

    @property
    def files(self) -> tuple[Path, ...]:
        """The files beside the store that have such weights."""
        return self._files.paths

    @property
    def root(self) -> Path | None:
        """The path that was given as ``weights``, or where it is now, if the store has it."""
        return self._files.root

    def check_files(self, part: int, parts: int) -> None:
        """Verify one of ``parts`` of the weights in files beside the store.

        Raises:
            CorruptionError: they are not what they were.
        """
        for unit in self._files.digested[part::parts]:
            self._files.check(unit)

    def weights(self) -> list[StreamedTensor]:
        """Return every parameter once, then the buffers and the tensors of extra state."""
        others = {**self.facts["buffers"], **named_tensors(self.facts.get("states", {}))}
        return self.parameters() + [in_memory(name, value) for name, value in others.items()]

    def parameters(self) -> list[StreamedTensor]:
        """Return every parameter that the model had at the commit, once, by its name then."""
        found = []
        for number, unit in enumerate(self.units):
            page = iter(unit.get("page", ()))
            for chunk in unit["chunks"]:
                dtype = getattr(torch, chunk["dtype"])
                for p in chunk["params"]:
                    if (part := next(page, None)) is None:
                        found.append(self._tensor(p, dtype, self._weight(number, chunk)))
                    else:
                        begin = partial(self.reader.begin, f"weights/{number}")
                        if self._files.has(number):
                            begin = partial(self._files.begin, number)
                        found.append(_as_parameter(p, unpacked(p, dtype, part, begin)))
        renamed = self.facts.get("renamed", {})
        names = [renamed.get(each.name, each.name) for each in found]
        return [
            replace(each, name=name)
            for each, name in zip(found, names, strict=True)
            if name is not None
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's format, with streamed tensors.

        Parameters are numbered as in the optimizer that trained; each group lists their names.
        Separate masters are included as ``master``.
        """
        members: list[list[str]] = self.facts["members"]
        renamed = self.facts.get("renamed", {})
        number_of = {name: number for number, name in enumerate(n for m in members for n in m)}
        groups = [
            {
                **kept,
                "params": [number_of[name] for name in names],
                "param_names": [renamed.get(name) or name for name in names],
            }
            for kept, names in zip(self.facts["groups"], members, strict=True)
        ]
        state: dict[int, Any] = {}
        for unit_number, unit in enumerate(self.units):
            for chunk_number, chunk in enumerate(unit["chunks"]):
                for p in chunk["params"] if chunk["group"] is not None else ():
                    steps = self.facts["steps"][p["index"]]
                    if steps:
                        moments = self._moments(unit_number, chunk_number, p)
                        if not self.is_streamed(unit_number, chunk_number):
                            count = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
                            moments = {"step": count, **moments}
                        state[number_of[p["name"]]] = moments
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def is_streamed(self, unit: int, chunk: int) -> bool:
        """Return whether the state of a chunk is that of an optimizer with its own step."""
        subgroups = [s for s in self.units[unit]["subgroups"] if s["chunk"] == chunk]
        return any(f["name"] == RECORD for s in subgroups for f in s["fields"])

    # -- parts ----------------------------------------------------------------------------------

    def _tensor(
        self, p: Node, dtype: torch.dtype, begin: Begin, cuts: Sequence[int] = ()
    ) -> StreamedTensor:
        """Make a streamed tensor of a parameter; ``begin`` reads elements of its chunk.

        Args:
            cuts: boundaries between records; no part crosses one, so that no copy is needed to join
                pieces.
        """
        first, numel, shape = p["offset"], p["numel"], tuple(p["shape"])

        def parts() -> Iterator[Part]:
            at = first
            while at < first + numel:
                stop = min(at - at % BLOCK + STEP, first + numel)
                stop = next((cut for cut in cuts if at < cut < stop), stop)
                yield part(begin(at, stop), stop - at)
                at = stop

        def turned() -> Iterator[Part]:
            flat = begin(first, first + numel)
            yield part(lambda: flat().as_strided(shape, p["stride"]), numel)

        def part(value: Callable[[], torch.Tensor], count: int) -> Part:
            return Part(count * dtype.itemsize, lambda: bytes_of(value()))

        dense = torch.empty(shape, device="meta").stride() == tuple(p["stride"]) or numel < 2
        streamed = StreamedTensor(p["name"], dtype, shape, parts if dense else turned)
        return _as_parameter(p, streamed)

    def _weight(self, unit: int, chunk: Node) -> Begin:
        dtype = getattr(torch, chunk["dtype"])

        def begin(start: int, stop: int) -> Callable[[], torch.Tensor]:
            low, high = (chunk["byte_offset"] + i * dtype.itemsize for i in (start, stop))
            if self._files.has(unit):
                data = self._files.begin(unit, low, high)
            else:
                data = self.reader.begin(f"weights/{unit}", low, high)
            return lambda: torch.from_numpy(data()).view(dtype)

        return begin

    def _moments(self, unit: int, number: int, p: Node) -> dict[str, Any]:
        chunk = self.units[unit]["chunks"][number]
        subgroups = [s for s in self.units[unit]["subgroups"] if s["chunk"] == number]
        cuts = [s["start"] for s in subgroups]
        fields = {f["name"]: f for s in subgroups for f in s["fields"] if f["block"] == 1}
        found: dict[str, Any] = {}
        if self.is_streamed(unit, number):
            found |= self._own_state(subgroups[0])
        for name in fields:
            if name not in MASTERS:
                found[name] = self._tensor(p, torch.float32, self._field(subgroups, name), cuts)
        if set(MASTERS) & fields.keys():
            (name,) = set(MASTERS) & fields.keys()
            stored, upper = self._field(subgroups, name), self._weight(unit, chunk)

            def exact(start: int, stop: int) -> Callable[[], torch.Tensor]:
                lower = stored(start, stop)
                return lower if name == "master" else _joined(upper(start, stop), lower)

            key = MASTER if self.is_streamed(unit, number) else "master"
            found[key] = self._tensor(p, torch.float32, exact, cuts)
        return found

    def _own_state(self, subgroup: Node) -> dict[str, Any]:
        """Return the state that a streamed optimizer keeps of a parameter.

        Raises:
            OffloadError: it has objects, which only a program with that optimizer can read.
        """
        (field,) = [f for f in subgroup["fields"] if f["name"] == RECORD]
        first, key = field["offset"], f"state/{subgroup['index']}"

        def tensor_at(slot: Slot) -> StreamedTensor:
            span = first + slot.offset, first + slot.offset + slot.nbytes

            def value() -> torch.Tensor:
                flat = torch.from_numpy(self.reader.begin(key, *span)()).view(slot.dtype)
                return flat.as_strided(slot.shape, slot.stride)

            return lazy(key, slot.dtype, slot.shape, value)

        try:
            length = length_in(bytes(self.reader.begin(key, first, first + HEADER)()))
            start = first + HEADER
            text = bytes(self.reader.begin(key, start, start + length)()) if length else b""
            return structure(text, tensor_at) if length else {}
        except pickle.UnpicklingError as error:
            raise ExportError(
                f"{error}, which an export cannot read; resume the store with its optimizer, and "
                "torch.save(optimizer.state_dict(), path)"
            ) from error

    def _field(self, subgroups: list[Node], name: str) -> Begin:
        def begin(start: int, stop: int) -> Callable[[], torch.Tensor]:
            cuts = []
            for s in subgroups:
                low, high = max(start, s["start"]), min(stop, s["start"] + s["count"])
                if low < high:
                    cuts.append(self._begin_field(s, name, low - s["start"], high - s["start"]))
            return cuts[0] if len(cuts) == 1 else lambda: torch.cat([cut() for cut in cuts])

        return begin

    def _begin_field(
        self, subgroup: Node, name: str, start: int, stop: int
    ) -> Callable[[], torch.Tensor]:
        """Request elements of one field of a record, decoded to fp32 (masters are not decoded)."""
        first = start - start % BLOCK
        begun: dict[str, tuple[torch.dtype, Callable[[], Bytes]]] = {}
        for f in subgroup["fields"]:
            if f["name"] == name or f["block"] > 1:
                dtype = getattr(torch, f["dtype"])
                span = [first // f["block"], -(-stop // f["block"])]
                low, high = (f["offset"] + i * dtype.itemsize for i in span)
                data = self.reader.begin(f"state/{subgroup['index']}", low, high)
                begun[f["name"]] = dtype, data

        def wait() -> torch.Tensor:
            record = {k: torch.from_numpy(d()).view(dtype) for k, (dtype, d) in begun.items()}
            value = record[name]
            if name not in MASTERS and value.dtype is not torch.float32:
                value = read_moment(record, name)
            return value[start - first :]

        return wait


def _as_parameter(p: Node, stored: StreamedTensor) -> StreamedTensor:
    """Convert a stored tensor to the model's dtype and shape, which share the bytes."""
    if not p.get("complex"):
        return stored
    return replace(stored, dtype=stored.dtype.to_complex(), shape=stored.shape[:-1])


def _joined(
    upper: Callable[[], torch.Tensor], lower: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Join masters from their upper halves, the weights, and their lower halves."""

    def wait() -> torch.Tensor:
        halves = (t.view(torch.uint16).numpy() for t in (upper(), lower()))
        return torch.from_numpy(join_halves(*halves))

    return wait
