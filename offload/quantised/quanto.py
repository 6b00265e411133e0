"""Quanto (optimum-quanto): qint8 and qfloat8 with a scale per row, qint4 and qint2 in groups.

``X.weight._data`` and ``X.weight._scale`` are 8-bit codes and their scales.  Weights of 4 and 2
bits have ``X.weight._data._data``, ``X.weight._scale`` and ``X.weight._shift``.  Their groups are
the rows of a matrix, and a byte has codes of 2 or 4 rows: see Note [Planes of Quanto].  Layouts of
Quanto's own kernels (AWQ, Marlin, TinyGEMM) are not written to files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..optim.quantised import Codes, Scaling, dequantise
from .format_base import Files, Format, QuantisedWeight, StoredTensor, require, stored, whole
from .scaled import KINDS, Scaled

METHODS = ("quanto",)
_DATA, _SCALE, _SHIFT = "._data", "._scale", "._shift"
_PACKED = _DATA + _DATA
# Bits of weights, by ``weights`` (transformers) or ``weights_dtype`` (diffusers).
_BITS = {None: None, "int8": 8, "float8": 8, "int4": 4, "int2": 2}
_GROUPS = (32, 64, 96, 128)  # sizes of groups that Quanto's modules choose from
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ZERO_POINTS = (torch.uint8, torch.int8)
_WINDOW = 1 << 22  # elements of a temporary, where the weight has another dtype than the scales


# Note [Planes of Quanto]
#
# Quanto packs along rows. With 4 bits and ``high`` rows of bytes, the lower halves of the bytes
# are the codes of rows 0 to high - 1, and the upper halves those of rows high to 2 * high - 1. With
# 2 bits there are four such planes. The last plane has fewer rows, or none, where rows do not
# divide.
#
# The rows of a plane are contiguous in the weight. For each plane, the kernel therefore reads bytes
# as codes of 8 bits, with a table that picks the bits of the plane. Files and pages have each byte
# once.
#
# A shift of the scales' dtype is subtracted from the product with the scale, and both steps round
# to that dtype. The kernel computes the product, and torch subtracts. A shift that is an integer
# is an ordinary zero point.
@dataclass(frozen=True)
class QBits(Format):
    """A weight of 4 or 2 bits.

    Attributes:
        bits: of a code.
        rows: of the matrix of codes: groups of the weight, or its rows if these are whole.
        grid: rows and columns of the scales: a scale per row, or for a single row, per column.
        shifts: dtype of the shifts: ``dtype``, or uint8 or int8 for zero points.
    """

    kind: ClassVar[str] = "quanto"
    bits: int
    rows: int
    grid: tuple[int, int]
    shifts: torch.dtype

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        return {
            "codes": StoredTensor(
                torch.uint8, (-(-self.rows * self.bits // 8), self.numel // self.rows)
            ),
            "scales": StoredTensor(self.dtype, self.grid),
            "shifts": StoredTensor(self.shifts, self.grid),
        }

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        high, columns = self.tensors["codes"].shape
        direct = not self.shifts.is_floating_point or weight.dtype == self.dtype
        step = high if direct else max(4, _WINDOW // columns // 4 * 4)
        for first in range(0, self.rows, high):
            stop = min(first + high, self.rows)
            for row in range(first, stop, step):
                last = min(row + step, stop)
                part = weight[row * columns : last * columns]
                made = part if direct else torch.empty_like(part, dtype=self.dtype)
                self._fill(row, last, tensors, made)
                if not direct:
                    part.copy_(made)

    def _fill(
        self, row: int, last: int, tensors: Mapping[str, torch.Tensor], made: torch.Tensor
    ) -> None:
        """Fill ``made``, flat, with rows of one plane; the first one is a multiple of 4 in it."""
        high, columns = self.tensors["codes"].shape
        plane, first = divmod(row, high)
        count = last - row
        data = tensors["codes"].reshape(-1)[first * columns :][: count * columns]
        own = slice(None) if self.grid[0] == 1 else slice(row, last)
        scales, shifts = tensors["scales"][own], tensors["shifts"][own]
        zeros = None
        if not self.shifts.is_floating_point:
            zeros = shifts.to(torch.int8).float()
        dequantise(
            Codes("rows", 8, count, columns, columns), data,
            _table_of_plane(self.bits, plane, data.device), scales.float(),
            Scaling((1, columns // self.grid[1]), through=self.dtype), made, zeros=zeros,
        )  # fmt: skip
        if zeros is None:
            made.view(count, columns).sub_(shifts)


@functools.lru_cache(maxsize=64)
def _table_of_plane(bits: int, plane: int, where: torch.device) -> torch.Tensor:
    """Return the code of a plane in every byte, fp32 of 256."""
    every = torch.arange(256, device="cpu")
    return (every >> (bits * plane) & ((1 << bits) - 1)).float().to(where)


def is_written_in(names: Iterable[str]) -> bool:
    """Return whether there are names of Quanto's tensors."""
    return any(name.endswith(_DATA) for name in names)


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: one of them is incomplete, or its layout is unknown.
    """
    given = config.get("weights", config.get("weights_dtype"))
    known = given is None or (isinstance(given, str) and given in _BITS)
    require(known, "weights", f"of Quanto are {given!r}, which cannot be read")
    for name in files.names:
        if name.endswith(_PACKED):
            yield _bits(files, name.removesuffix(_PACKED), _BITS[given])
        elif name.endswith(_DATA):
            yield _bytes(files, name.removesuffix(_DATA))


def _bytes(files: Files, name: str) -> QuantisedWeight:
    """Return a weight of qint8 or qfloat8."""
    codes, scales = stored(files, name + _DATA), stored(files, name + _SCALE)
    require(
        codes.dtype in KINDS and scales.dtype in _FLOATS, name,
        f"of Quanto has codes of {codes.dtype} and scales of {scales.dtype}, which cannot be read",
    )  # fmt: skip
    require(files.shape(name + _SHIFT) is None, name, "of Quanto has shifts beside 8-bit codes")
    shape = codes.shape
    require(len(shape) > 1 and math.prod(shape), name, f"of Quanto has codes of {shape}")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    ones = (1,) * (len(shape) - 1)
    if math.prod(scales.shape) == 1:
        grid, block = (1, 1), (rows, columns)
    elif scales.shape == (shape[0], *ones):
        grid, block = (shape[0], 1), (rows // shape[0], columns)
    else:
        require(scales.shape == (*ones, columns), name, _misfit(codes, scales))
        grid, block = (1, columns), (rows, 1)
    form = Scaled(shape, scales.dtype, codes.dtype, scales.dtype, grid, block)
    return whole(files, name, form, {"codes": name + _DATA, "scales": name + _SCALE})


def _bits(files: Files, name: str, given: int | None) -> QuantisedWeight:
    """Return a weight of qint4 or qint2; ``given``: the bits, if the configuration says."""
    codes, scales = stored(files, name + _PACKED), stored(files, name + _SCALE)
    shifts = stored(files, name + _SHIFT)
    require(
        codes.dtype == torch.uint8 and scales.dtype in _FLOATS
        and shifts.dtype in (scales.dtype, *_ZERO_POINTS), name,
        f"of Quanto has codes of {codes.dtype}, scales of {scales.dtype} and shifts of "
        f"{shifts.dtype}, which cannot be read",
    )  # fmt: skip
    require(
        shifts.shape == scales.shape, name,
        f"of Quanto has scales of {scales.shape} and shifts of {shifts.shape}",
    )  # fmt: skip
    ones, misfit = (1,) * (len(codes.shape) - 1), _misfit(codes, scales)
    require(ones and math.prod(codes.shape) and math.prod(scales.shape), name, misfit)
    if scales.shape[1:] == ones:
        rows, grid = scales.shape[0], (scales.shape[0], 1)
    else:  # as Quanto quantises a weight of a single row
        alone = len(ones) == codes.shape[0] == 1 and scales.shape == codes.shape
        require(alone, name, misfit)
        rows, grid = 1, (1, codes.shape[1])
    shape = _shape(files, name, rows, codes.shape[1:])
    bits = _bits_of(files, name, rows, codes, given)
    form = QBits(shape, scales.dtype, bits, rows, grid, shifts.dtype)
    tensors = {"codes": name + _PACKED, "scales": name + _SCALE, "shifts": name + _SHIFT}
    found = whole(files, name, form, tensors)
    told = files.shape(_bias_of(name)) is not None
    return found._replace(flat=not told and codes.shape[1:] in [(each,) for each in _GROUPS])


def _misfit(codes: StoredTensor, scales: StoredTensor) -> str:
    return f"of Quanto has codes of {codes.shape} and scales of {scales.shape}, which do not fit"


def _shape(files: Files, name: str, rows: int, across: tuple[int, ...]) -> tuple[int, ...]:
    """Return a weight's shape, given the rows of its matrix of codes and the shape of a row.

    If rows can be groups, only the model or a bias tells the shape.  Without a bias, the rows are
    assumed to be those of the weight.  Its elements have the same order in all of these shapes.
    """
    bias = files.shape(_bias_of(name))
    if bias is None or bias == (rows,):
        return (rows, *across)
    fits = len(bias) == 1 and len(across) == 1 and across[0] in _GROUPS
    require(
        fits and bias[0] and rows % bias[0] == 0, name,
        f"of Quanto has {rows} rows of codes of {across}, and a bias of {bias}",
    )  # fmt: skip
    return bias[0], rows // bias[0] * across[0]


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _bits_of(files: Files, name: str, rows: int, codes: StoredTensor, given: int | None) -> int:
    """Return the bits of a code, from the rows that share a byte.

    Raises:
        UnreadableFormat: there are no such codes, or they may be of 2 or of 4 bits.
    """
    fitting = [bits for bits in (2, 4) if -(-rows * bits // 8) == codes.shape[0]]
    if given is not None:
        fitting = [bits for bits in fitting if bits == given]
    if len(fitting) == 2 and (rows == 1 or int(files.read(name + _PACKED).max()) > 15):
        fitting = [4]  # a single row of 2 bits has the same codes when it is read as 4 bits
    require(
        len(fitting) == 1, name,
        f"of Quanto has {codes.shape[0]} rows of bytes for {rows} rows of codes, which "
        + ("may be of 2 or 4 bits" if fitting else f"are not of {given or '2 or 4'} bits"),
    )  # fmt: skip
    return fitting[0]
