"""What formats of quantised weights have in common: their tensors, and pages made of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..optim.packed_layout import BORDER
from ..optim.quantised import require_index
from ..schedule.units import align


class Files(Protocol):
    """Files with tensors, as the formats see them."""

    @property
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def dtypes(self, name: str) -> Collection[torch.dtype]: ...
    def read(self, name: str) -> torch.Tensor: ...


_E8M0_BIAS = 127  # of the exponent of E8M0 (OCP Microscaling Formats v1.0, section 5.4.1)


class UnreadableFormat(ValueError):
    """A weight is quantised in a way that cannot be read."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that belongs to a quantised weight."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """One quantised weight: its shape, its tensors, and how to compute it.

    Subclasses are frozen dataclasses whose fields are numbers, strings, dtypes, and tuples of
    these, so that a store can describe them.  Each has a ``kind`` of its own.

    Attributes:
        shape: of the weight.
        dtype: to which the format's own library dequantises.
    """

    kind: ClassVar[str]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return math.prod(self.shape)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Its tensors, in the order in which a page has them."""
        raise NotImplementedError

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Fill ``weight``, flat and of a float dtype, from its tensors, on their device."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the format as JSON values; see ``formats.described``."""
        values = {each.name: _as_json(getattr(self, each.name)) for each in fields(self)}
        return {"kind": self.kind, **values}


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_as_json(each) for each in value] if isinstance(value, tuple) else value


class TensorSource(NamedTuple):
    """Where a tensor of a quantised weight begins: in a tensor of the files."""

    name: str
    first_byte: int = 0


class WeightPiece(NamedTuple):
    """A part of a weight, contiguous in memory, that is quantised on its own.

    Attributes:
        start: its first element in the weight.
        sources: its tensors, by their names in ``Format.tensors``.
    """

    start: int
    form: Format
    sources: Mapping[str, TensorSource]


class QuantisedWeight(NamedTuple):
    """A quantised weight in files, under the name that it would have there unquantised.

    Attributes:
        dtype: to which it is dequantised.
        others: further tensors in the files that say how to read it.
        flat: whether the files tell the order of the elements, but not the shape for certain.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[WeightPiece, ...]
    others: tuple[str, ...] = ()
    flat: bool = False


def whole(
    files: Files, name: str, form: Format, tensors: Mapping[str, str], others: tuple[str, ...] = ()
) -> QuantisedWeight:
    """Return a weight of one piece, given the names of its tensors in the files.

    Raises:
        UnreadableFormat: a tensor is missing, or has another dtype or size.
    """
    for key, each in tensors.items():
        found, wanted = stored(files, each), form.tensors[key]
        require(
            found.dtype == wanted.dtype and found.nbytes == wanted.nbytes, each,
            f"is {found.dtype} of {found.shape}, expected {wanted.dtype} of {wanted.shape}",
        )  # fmt: skip
    sources = {key: TensorSource(each) for key, each in tensors.items()}
    return QuantisedWeight(name, form.shape, form.dtype, (WeightPiece(0, form, sources),), others)


@dataclass(frozen=True)
class QuantisedPage:
    """A parameter's part of a page: the tensors of its pieces, one after the other.

    Attributes:
        pieces: the first element of each piece, and its format.
    """

    pieces: tuple[tuple[int, Format], ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole part."""
        return max((offset + each.nbytes for _, _, offset, each in self.places()), default=0)

    def places(self) -> Iterator[tuple[int, str, int, StoredTensor]]:
        """Yield each tensor: the number of its piece, its name, its offset in bytes, and itself."""
        offset = 0
        for number, (_, form) in enumerate(self.pieces):
            for name, each in form.tensors.items():
                yield number, name, offset, each
                offset += align(each.nbytes, BORDER)

    def describe(self) -> list[Any]:
        """Return the part as JSON values, for the description of a store."""
        return [[start, form.describe()] for start, form in self.pieces]

    def unpack(self, page: torch.Tensor, weight: torch.Tensor) -> None:
        """Fill ``weight``, flat, from ``page``: uint8, flat, beginning on a multiple of 64 bytes.

        Both are on one device; on a GPU it runs on torch's current stream.
        """
        tensors: dict[int, dict[str, torch.Tensor]] = {}
        for number, name, offset, each in self.places():
            part = page[offset : offset + each.nbytes].view(each.dtype).view(each.shape)
            tensors.setdefault(number, {})[name] = part
        for number, (start, form) in enumerate(self.pieces):
            form.dequantise(tensors[number], weight[start : start + form.numel])


def is_in_order(files: Files, name: str, columns: int, groups: int, block: int) -> bool:
    """Return whether columns belong to groups one after the other, ``block`` columns to each.

    Args:
        name: the tensor with the group of each column; if there is none, they do.

    Raises:
        UnreadableFormat: a group does not exist.
    """
    if files.shape(name) is None:
        return True
    index = files.read(name)
    try:
        require_index(index, groups)
    except ValueError as error:
        raise UnreadableFormat(f"{name}: {error}") from error
    expected = torch.arange(columns, dtype=index.dtype, device="cpu") // block
    return torch.equal(index, expected)


def require(condition: object, name: str, why: str) -> None:
    """Raise ``UnreadableFormat`` unless ``condition`` holds."""
    if not condition:
        raise UnreadableFormat(f"{name} {why}")


def stored(files: Files, name: str) -> StoredTensor:
    """Return the dtype and shape of a tensor in the files.

    Raises:
        UnreadableFormat: there is no such tensor, or its dtype is unknown.
    """
    shape = files.shape(name)
    dtypes = () if shape is None else tuple(files.dtypes(name))
    if shape is None or len(dtypes) != 1:
        raise UnreadableFormat(f"{name} is missing or of an unknown dtype")
    return StoredTensor(dtypes[0], shape)


def as_fp32(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of any dtype as contiguous fp32; uint8 holds exponents of two."""
    if scales.dtype == torch.uint8:
        exponents = scales.int() - _E8M0_BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return scales.float().contiguous()
