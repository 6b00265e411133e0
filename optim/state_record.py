"""One parameter's optimizer state as bytes: its tensors in place, and everything else pickled.

A record begins with the length of a pickle and the pickle itself, which has the state's structure
with references to its larger tensors.  These lie behind it.  A record of zeros is the empty state.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values() if isinstance(each, torch.dtype)
}  # fmt: skip
ALIGN = 64
SMALL = 16
"""Tensors of at most so many elements, such as a step count, are part of the pickle."""
HEADER = 16

_CONTAINERS = {
    ("builtins", name): getattr(__import__("builtins"), name)
    for name in ("set", "frozenset", "complex", "bytearray", "slice", "range")
} | {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("builtins", "dict"): dict, ("builtins", "list"): list, ("builtins", "int"): int,
    ("builtins", "float"): float,
}  # fmt: skip

Classes = Mapping[tuple[str, str], type]


class UnknownClassError(Exception):
    """A parameter's state has an object whose class a reader of the record would not know."""


class RecordFullError(Exception):
    """A parameter's state needs more bytes than its record has."""

    def __init__(self, need: int, have: int) -> None:
        super().__init__(need, have)
        self.need, self.have = need, have


@dataclass(frozen=True)
class Slot:
    """A tensor's place in the record: its dtype, shape and strides, and its offset in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        span = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) + 1
        return span * self.dtype.itemsize

    def view(self, record: Tensor) -> Tensor:
        data = record[self.offset : self.offset + self.nbytes].view(self.dtype)
        return data.as_strided(self.shape, self.stride, data.storage_offset())


class _Pickler(pickle.Pickler):
    """Pickles state, and collects the tensors that are too large for the pickle."""

    def __init__(
        self, file: io.BytesIO, param: Tensor | None, place: Callable[[Tensor], Any]
    ) -> None:
        super().__init__(file, protocol=4)
        self._param, self._place = param, place
        self.classes: dict[tuple[str, str], type] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value is self._param:
                return ("param",)
            if value.numel() <= SMALL:
                return "small", *_small(value)
            return ("tensor", *self._place(value))
        if isinstance(value, torch.Generator):
            return ("generator", value.device.type, _bytes(value.get_state()))
        if isinstance(value, torch.dtype):
            return ("dtype", _name(value))
        if isinstance(value, torch.device):
            return ("device", str(value))
        if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biufc":
            return ("numpy", value.dtype.str, value.shape, value.tobytes())
        if isinstance(value, type):
            self._note(value)
        elif type(value).__module__ != "builtins":
            self._note(type(value))
        return None

    def _note(self, kind: type) -> None:
        key = kind.__module__, kind.__qualname__
        if key not in _CONTAINERS:
            self.classes[key] = kind


class _Unpickler(pickle.Unpickler):
    """Restores state; builds no object of a class that is not given.

    ``device`` is ``None`` for an export, which has no generators.
    """

    def __init__(
        self, text: bytes, tensor_at: Callable[[Slot], Any], device: torch.device | None,
        param: Tensor | None, classes: Classes,
    ) -> None:  # fmt: skip
        super().__init__(io.BytesIO(text))
        self._tensor_at, self._device = tensor_at, device
        self._param, self._classes = param, classes
        self.slots: list[Slot] = []

    def find_class(self, module: str, name: str) -> Any:
        found = _CONTAINERS.get((module, name)) or self._classes.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"the state holds an object of {module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "param":
            return self._param
        if kind == "small":
            name, shape, stride, data, on_cpu = rest
            value = torch.empty_strided(shape, stride, dtype=_DTYPES[name], device="cpu")
            if data:
                flat = torch.frombuffer(bytearray(data), dtype=value.dtype)
                value.copy_(flat.as_strided(shape, stride))
            return value if on_cpu or self._device is None else value.to(self._device)
        if kind == "tensor":
            name, shape, stride, offset = rest
            slot = Slot(_DTYPES[name], shape, stride, offset)
            self.slots.append(slot)
            return self._tensor_at(slot)
        if kind == "numpy":
            name, shape, data = rest
            array = np.frombuffer(data, np.dtype(name)).reshape(shape).copy()
            return array if shape else array[()]
        if kind == "generator":
            if self._device is None:
                raise pickle.UnpicklingError("the state holds a torch.Generator")
            device, data = rest
            made = torch.Generator(self._device if device != "cpu" else "cpu")
            made.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return made
        if kind == "dtype":
            return _DTYPES[rest[0]]
        if kind == "device":
            return torch.device(rest[0])
        raise pickle.UnpicklingError(f"unknown reference {kind!r}")


@dataclass(frozen=True)
class RecordFormat:
    """How one parameter's state is stored.

    Attributes:
        start: where tensors begin, in bytes; the pickle has the space before it.
        nbytes: size of the record.
    """

    start: int
    nbytes: int

    @staticmethod
    def of(state: dict[str, Any]) -> RecordFormat:
        """Return a format with room for a state, and for numbers in it that grow."""
        text, tensors, _ = _pickled(state)
        start = _align(HEADER + 2 * len(text) + 256, 512)
        return RecordFormat(start, _laid_out(tensors, start)[1])

    def with_room_for(self, state: dict[str, Any]) -> RecordFormat:
        """Return a format with room for another state as well."""
        other = RecordFormat.of(state)
        start = max(self.start, other.start)
        most = max(self.nbytes - self.start, other.nbytes - other.start)
        return RecordFormat(start, start + most)

    def read(
        self, record: Tensor, param: Tensor | None = None, classes: Classes | None = None,
        *, copies: bool = False,
    ) -> tuple[dict[str, Any], list[Slot]]:  # fmt: skip
        """Return the state that a record has; its larger tensors are views of the record.

        Args:
            record: uint8, ``nbytes`` long, on any device.
            param: what references to the parameter itself become.
            classes: those whose objects the state may hold, by module and name.
            copies: return copies instead of views.

        Returns:
            The state, and where its tensors are.

        Raises:
            pickle.UnpicklingError: the state has objects of other classes.
        """
        head = record[: self.start].cpu().numpy()  # from a device, one copy
        length = length_in(head[:8].tobytes())
        if not length:
            return {}, []
        text = head[HEADER : HEADER + length].tobytes()

        def tensor_at(slot: Slot) -> Tensor:
            return slot.view(record).clone() if copies else slot.view(record)

        reader = _Unpickler(text, tensor_at, record.device, param, classes or {})
        return reader.load(), reader.slots

    def write(
        self, record: Tensor, state: dict[str, Any], param: Tensor | None = None,
        slots: list[Slot] | None = None, classes: Classes | None = None,
    ) -> None:  # fmt: skip
        """Store a state; tensors that lie in their place already are not copied.

        Args:
            slots: where the tensors of the state before lie, as ``read`` returned it.
            classes: known to the reader of the record; ``None``: all classes in the state.

        Raises:
            RecordFullError: the state needs more bytes; nothing was changed.
            UnknownClassError: it has objects of other classes; nothing was changed.
        """
        if not state:
            record[:8].zero_()
            return
        text, tensors, places = self._arranged(state, param, slots or [], classes)
        memory = record.untyped_storage().data_ptr()
        moved = [
            (t.clone() if t.untyped_storage().data_ptr() == memory else t, slot)
            for t, slot in zip(tensors, places, strict=True)
            if t.data_ptr() != record.data_ptr() + slot.offset or not _is_as(t, slot)
        ]
        for tensor, slot in moved:
            slot.view(record).copy_(tensor)
        head = bytearray(len(text).to_bytes(HEADER, "little") + text)
        record[: len(head)].copy_(torch.frombuffer(head, dtype=torch.uint8))

    def check(self, state: dict[str, Any], param: Tensor, classes: Classes) -> None:
        """Raise what ``write`` would raise."""
        if state:
            self._arranged(state, param, [], classes)

    def _arranged(
        self, state: dict[str, Any], param: Tensor | None, places: list[Slot],
        classes: Classes | None,
    ) -> tuple[bytes, list[Tensor], list[Slot]]:  # fmt: skip
        """Return the pickle of a state, its tensors, and where these go."""
        text, tensors, found = _pickled(state, param, places)
        if classes is not None and (unknown := found.keys() - classes.keys()):
            raise UnknownClassError(".".join(min(unknown)))
        if not _same_places(tensors, places):
            places, end = _laid_out(tensors, self.start)
            if end > self.nbytes:
                raise RecordFullError(end, self.nbytes)
            text, _, _ = _pickled(state, param, places)
        if HEADER + len(text) > self.start:
            raise RecordFullError(self.nbytes + HEADER + len(text) - self.start, self.nbytes)
        return text, tensors, places


def length_in(header: bytes) -> int:
    """Return the bytes of the pickle behind the header of a record; 0: the state is empty."""
    return int.from_bytes(header[:8], "little")


def structure(text: bytes, tensor_at: Callable[[Slot], Any]) -> dict[str, Any]:
    """Return a state without its larger tensors, for each of which ``tensor_at`` is called.

    Raises:
        pickle.UnpicklingError: the state has objects other than containers.
    """
    found = _Unpickler(text, tensor_at, None, None, {}).load()
    assert isinstance(found, dict)
    return found


def _pickled(
    state: Any, param: Tensor | None = None, slots: list[Slot] | None = None
) -> tuple[bytes, list[Tensor], dict[tuple[str, str], type]]:
    """Pickle a state; its tensors refer to ``slots`` in turn, if these suit them.

    Returns:
        The pickle, the tensors in the order of their references, and the classes of objects.
    """
    tensors: list[Tensor] = []

    def place(value: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
        number = len(tensors)
        tensors.append(value)
        offset = slots[number].offset if slots and number < len(slots) else 0
        return _name(value.dtype), tuple(value.shape), _dense(value), offset

    file = io.BytesIO()
    pickler = _Pickler(file, param, place)
    pickler.dump(state)
    return file.getvalue(), tensors, pickler.classes


def _same_places(tensors: list[Tensor], slots: list[Slot]) -> bool:
    return len(tensors) == len(slots) and all(
        (t.dtype, tuple(t.shape), _dense(t)) == (slot.dtype, slot.shape, slot.stride)
        for t, slot in zip(tensors, slots, strict=True)
    )


def _is_as(tensor: Tensor, slot: Slot) -> bool:
    """Return whether a tensor reads its memory as a slot does."""
    steps = zip(tensor.stride(), slot.stride, tensor.shape, strict=True)
    return not (tensor.is_conj() or tensor.is_neg()) and all(a == b or n < 2 for a, b, n in steps)


def _laid_out(tensors: list[Tensor], start: int) -> tuple[list[Slot], int]:
    """Return places for tensors from ``start`` on, and where they end."""
    slots = []
    for t in tensors:
        slots.append(Slot(t.dtype, tuple(t.shape), _dense(t), start))
        start = _align(start + slots[-1].nbytes, ALIGN)
    return slots, start


def _dense(value: Tensor) -> tuple[int, ...]:
    """Return strides without gaps, in the order of the tensor's own.

    Matrix products give other bits for matrices that are transposed in memory.
    """
    found, expected = [0] * value.dim(), 1
    for dim in sorted(range(value.dim()), key=lambda d: (value.stride(d), -d)):
        found[dim] = expected
        expected *= max(value.shape[dim], 1)
    return tuple(found)


def tensors_in(state: Any) -> list[Tensor]:
    """Return all tensors of a state, also small ones and those in containers and objects."""
    found: list[Tensor] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Tensor):
                found.append(value)
            return "" if isinstance(value, (Tensor, torch.Generator)) else None

    Finder(io.BytesIO(), protocol=4).dump(state)
    return found


def structure_of(state: Any) -> bytes:
    """Return bytes that differ if a state has other numbers, or other tensors as objects."""
    memory = io.BytesIO()

    class Finder(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            kept = isinstance(value, (Tensor, torch.Generator))
            return str(id(value)) if kept else None

    Finder(memory, protocol=4).dump(state)
    return memory.getvalue()


def classes_in(state: Any) -> dict[tuple[str, str], type]:
    """Return the classes of objects in a state, other than containers, numbers and tensors."""
    pickler = _Pickler(io.BytesIO(), None, lambda value: ())
    pickler.dump(state)
    return pickler.classes


def _align(nbytes: int, border: int) -> int:
    return -(-nbytes // border) * border


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _small(value: Tensor) -> tuple[Any, ...]:
    stride = _dense(value)
    device = "meta" if value.is_meta else "cpu"
    copied = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device)
    flat = copied.copy_(value.detach()).as_strided((value.numel(),), (1,))
    return _name(value.dtype), tuple(value.shape), stride, _bytes(flat), value.device.type == "cpu"


def _bytes(value: Tensor) -> bytes:
    if value.is_meta:
        return bytes(value.numel() * value.dtype.itemsize)
    flat = value.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
