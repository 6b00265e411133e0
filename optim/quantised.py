"""Dequantisation of weights that other libraries have quantised.

Nearly all formats are one computation.  An element has a code of a few bits.  A table says which
number a code stands for.  Elements of a block share a scale and, in some formats, a zero point:

    weight = (table[code] - zero) * scale * factor

The formats differ in where codes lie, in how blocks are cut, and in what is rounded.  ``Codes`` and
``Scaling`` describe that, so that one kernel serves all of them.

The arithmetic is fp32.  Numbers and zero points have at most 9 significant bits, and their
difference as well, so that products with fp16 and bf16 scales are exact in fp32.  Rounding them to
the dtype of the scales (``Scaling.through``) therefore gives what a library computes in that dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import kernels, quantised_device

Order = Literal["rows", "halves", "interleaved", "awq"]
ORDERS = {"rows": 0, "halves": 1, "interleaved": 2, "awq": 3}  # numbers that the kernels know
WORD = 4  # bytes
# AWQ: the codes of rows 0 to 7 are in these nibbles of a word.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
WINDOW = 1 << 20  # elements that plain torch dequantises at a time, to bound its temporary memory


@dataclass(frozen=True)
class Codes:
    """Where the codes of a matrix lie in memory.

    Attributes:
        order: ``"rows"``: every row is a sequence of bits, the lowest of a byte first, in
            ``row_bytes``.  ``"halves"``: the same with 4 bits, but the upper half of a byte comes
            first (bitsandbytes).  ``"interleaved"``: every row is a sequence of bits in 32-bit
            words, and word ``w`` of row ``r`` is word ``w * rows + r`` (GPTQ).  ``"awq"``: a word
            has the 4-bit codes of a column in eight rows, in the order ``AWQ_NIBBLES``, and lies at
            ``column * rows / 8 + row / 8``.
        bits: of a code, 1 to 8.
        rows, columns: of the matrix.
        row_bytes: of a row; for ``"rows"`` and ``"halves"``.
    """

    order: Order
    bits: int
    rows: int
    columns: int
    row_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all codes."""
        if self.order == "interleaved":
            return self.rows * -(-self.columns * self.bits // (8 * WORD)) * WORD
        if self.order == "awq":
            return self.columns * self.rows // 2
        return self.rows * self.row_bytes

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Scaling:
    """How numbers become weights.

    Attributes:
        block: rows and columns that share a scale; the last ones may be cut off by the border.
        factor: by which products with the scale are multiplied.
        through: dtype to which the result is rounded before it is rounded to that of the weight.
        transposed: whether the weight is the transposed matrix.
    """

    block: tuple[int, int]
    factor: float = 1.0
    through: torch.dtype = torch.float32
    transposed: bool = False


def scales_shape(codes: Codes, scaling: Scaling, groups: int | None = None) -> tuple[int, int]:
    """Return the shape of the scales: rows and columns of blocks.

    Args:
        groups: number of scales of a row, if columns are assigned to them by an index.
    """
    rows, columns = scaling.block
    return -(-codes.rows // rows), groups or -(-codes.columns // columns)


def dequantise(
    codes: Codes, data: Tensor, table: Tensor, scales: Tensor, scaling: Scaling, weight: Tensor,
    *, zeros: Tensor | None = None, index: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill ``weight`` from codes; all tensors are contiguous and on one device.

    On a GPU it runs on torch's current stream.

    Args:
        data: uint8, flat, beginning on a multiple of 4 bytes: the codes.
        table: fp32 of ``2 ** bits``: the number that each code stands for.
        scales: fp32 of ``scales_shape``.
        weight: flat, fp32, bf16 or fp16.
        zeros: fp32, like ``scales``; ``None`` for zero.
        index: int32 of ``columns``: the column of ``scales`` that a column uses, instead of
            ``column // block``.

    Raises:
        ValueError: the order cannot have such codes; shapes, dtypes or devices do not fit together;
            or, on the CPU, ``index`` is out of range.
    """
    _check_layout(codes, scaling)
    _check(codes, data, table, scales, scaling, weight, zeros, index)
    if not codes.numel:
        return
    tensors = {
        "codes": data, "table": table, "scales": scales, "zeros": zeros, "index": index,
        "weight": weight,
    }  # fmt: skip
    if weight.device.type == "cpu" and kernels.NATIVE is not None:
        kernels.NATIVE.dequantise(**_job(codes, scaling, tensors))
    elif quantised_device.serves(weight):
        quantised_device.dequantise(_job(codes, scaling, tensors), weight)
    else:
        _dequantise_plainly(codes, data, table, scales, scaling, weight, zeros, index)


def _job(
    codes: Codes, scaling: Scaling, tensors: Mapping[str, Tensor | None]
) -> dict[str, int | float]:
    """Return the arguments of the native kernels, by name and in their order."""
    weight, scales = tensors["weight"], tensors["scales"]
    assert weight is not None and scales is not None
    return {
        **{name: 0 if each is None else each.data_ptr() for name, each in tensors.items()},
        "order": ORDERS[codes.order],
        "bits": codes.bits,
        "rows": codes.rows,
        "columns": codes.columns,
        "row_bytes": codes.row_bytes,
        "block_rows": scaling.block[0],
        "block_columns": scaling.block[1],
        "groups": scales.shape[1],
        "transposed": scaling.transposed,
        "through": kernels.FLOAT_TYPES[scaling.through],
        "weight_type": kernels.FLOAT_TYPES[weight.dtype],
        "factor": scaling.factor,
    }


def _dequantise_plainly(
    codes: Codes, data: Tensor, table: Tensor, scales: Tensor, scaling: Scaling, weight: Tensor,
    zeros: Tensor | None, index: Tensor | None,
) -> None:  # fmt: skip
    """Dequantise with plain torch operations, a tile at a time to bound temporary memory."""
    for r0, r1, c0, c1 in _tiles(codes):
        numbers = table[_codes_of(codes, data, r0, r1, c0, c1).long()]
        rows = torch.arange(r0, r1, device=weight.device) // scaling.block[0]
        columns = torch.arange(c0, c1, device=weight.device) // scaling.block[1]
        if index is not None:
            columns = index[c0:c1].long()
        if zeros is not None:
            numbers = numbers - zeros[rows][:, columns]
        made = numbers * scales[rows][:, columns]
        if scaling.factor != 1.0:
            made = made * scaling.factor
        made = made.to(scaling.through)
        if scaling.transposed:
            weight.view(codes.columns, codes.rows)[c0:c1, r0:r1] = made.t()
        else:
            weight.view(codes.rows, codes.columns)[r0:r1, c0:c1] = made


def _check_layout(codes: Codes, scaling: Scaling) -> None:
    """Raise ``ValueError`` unless the order can have such codes, and blocks are not empty."""
    if codes.order not in ORDERS:
        raise ValueError(f"the order of codes is one of {list(ORDERS)}, not {codes.order!r}")
    widths = range(1, 9) if codes.order in ("rows", "interleaved") else (4,)
    if codes.bits not in widths:
        raise ValueError(f"codes of {codes.bits} bits cannot lie in the order {codes.order!r}")
    if codes.order == "awq" and codes.rows % 8:
        raise ValueError(f"the rows of 'awq' are a multiple of 8, not {codes.rows}")
    if codes.order in ("rows", "halves") and codes.row_bytes * 8 < codes.columns * codes.bits:
        raise ValueError(
            f"{codes.columns} codes of {codes.bits} bits do not fit in {codes.row_bytes} bytes"
        )
    if min(codes.rows, codes.columns) < 0 or min(scaling.block) < 1:
        raise ValueError(f"a matrix of {codes.rows, codes.columns} in blocks of {scaling.block}")


def _check(
    codes: Codes, data: Tensor, table: Tensor, scales: Tensor, scaling: Scaling, weight: Tensor,
    zeros: Tensor | None, index: Tensor | None,
) -> None:  # fmt: skip
    kernels.check_flat("weight", weight, codes.numel)
    kernels.check_flat("codes", data, codes.nbytes)
    kernels.check_flat("table", table, 1 << codes.bits)
    if weight.dtype not in kernels.FLOAT_TYPES or data.dtype is not torch.uint8:
        raise ValueError(f"cannot dequantise {data.dtype} to {weight.dtype}")
    if scaling.through not in kernels.FLOAT_TYPES:
        raise ValueError(f"cannot round to {scaling.through}")
    given = (data, table, scales, weight, zeros, index)
    devices = {str(each.device) for each in given if each is not None}
    if len(devices) > 1 or table.dtype is not torch.float32:
        raise ValueError(f"tensors are on {sorted(devices)}, with a table of {table.dtype}")
    groups = None if index is None or scales.dim() == 0 else scales.shape[-1]
    shape = scales_shape(codes, scaling, groups)
    for name, each in (("scales", scales), ("zeros", zeros)):
        if each is None:
            continue
        if each.shape != shape or each.dtype is not torch.float32 or not each.is_contiguous():
            raise ValueError(f"{name} must be fp32 of {shape}, not {each.dtype} {each.shape}")
    if index is not None:
        kernels.check_flat("index", index, codes.columns)
        if index.dtype is not torch.int32:
            raise ValueError(f"index must be int32, not {index.dtype}")
        if index.device.type == "cpu":  # elsewhere this would wait for the device
            require_index(index, shape[1])


def require_index(index: Tensor, groups: int) -> None:
    """Raise ``ValueError`` unless every number of ``index`` is in ``[0, groups)``."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise ValueError(f"an index is not below {groups}, the number of scales of a row")


def _tiles(codes: Codes) -> list[tuple[int, int, int, int]]:
    """Cut a matrix into tiles of about ``WINDOW`` elements: first and last row, and column."""
    wide = min(codes.columns, WINDOW)
    high = max(8, WINDOW // max(1, wide) // 8 * 8)
    return [
        (r, min(r + high, codes.rows), c, min(c + wide, codes.columns))
        for r in range(0, codes.rows, high)
        for c in range(0, codes.columns, wide)
    ]


def _codes_of(codes: Codes, data: Tensor, r0: int, r1: int, c0: int, c1: int) -> Tensor:
    """Return the codes of a tile, uint8 or int32.  ``r0`` is a multiple of 8, ``c0`` of 32."""
    if codes.order == "awq":
        words = data.view(torch.int32).view(codes.columns, codes.rows // 8)
        picked = words[c0:c1, r0 // 8 : -(-r1 // 8)].unsqueeze(2) >> _awq_shifts(data.device)
        return (picked & 15).flatten(1)[:, : r1 - r0].t()
    if codes.order == "interleaved":
        words = data.view(torch.int32).view(-1, codes.rows)
        first, stop = c0 * codes.bits // 32, -(-c1 * codes.bits // 32)
        # A clone, as ``contiguous`` may keep odd strides of a dimension of one word.
        part = words[first:stop, r0:r1].t().clone(memory_format=torch.contiguous_format)
        return _from_bits(part.view(torch.uint8), codes.bits, c1 - c0)
    part = data.view(codes.rows, codes.row_bytes)[
        r0:r1, c0 * codes.bits // 8 : -(-c1 * codes.bits // 8)
    ]
    if codes.order == "halves":
        return torch.stack((part >> 4, part & 15), 2).flatten(1)[:, : c1 - c0]
    return _from_bits(part, codes.bits, c1 - c0)


@functools.lru_cache(maxsize=64)
def _awq_shifts(where: torch.device) -> Tensor:
    return torch.tensor(AWQ_NIBBLES, dtype=torch.int32, device="cpu").mul_(4).to(where)


def _from_bits(rows: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` codes of every row of bytes, lowest bits first."""
    if bits == 8:
        return rows[:, :count]
    if bits == 4:
        return torch.stack((rows & 15, rows >> 4), 2).flatten(1)[:, :count]
    at = torch.arange(count, device=rows.device) * bits
    padded = torch.nn.functional.pad(rows, (0, 2))
    low, high = padded[:, at // 8].int(), padded[:, at // 8 + 1].int()
    return ((low | (high << 8)) >> (at % 8).int()) & ((1 << bits) - 1)


def codes_of(codes: Codes, data: Tensor) -> Tensor:
    """Return all codes as a matrix, uint8 or int32; ``data`` is flat uint8."""
    return _codes_of(codes, data, 0, codes.rows, 0, codes.columns)


# -- what codes stand for -------------------------------------------------------------------------

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats (MX) v1.0, table 5


@functools.lru_cache(maxsize=64)
def table_of(kind: str, bits: int, where: torch.device) -> Tensor:
    """Return what the codes of a kind stand for, fp32 of ``2 ** bits``.

    Args:
        kind: ``"unsigned"``; ``"offset"``, which is unsigned less half of its range; ``"signed"``
            for two's complement; or an 8- or 4-bit float: ``"e4m3"``, ``"e5m2"``, ``"e2m1"``.
    """
    every = torch.arange(1 << bits, device="cpu")
    if kind == "e2m1":
        half = torch.tensor(_E2M1, dtype=torch.float32, device="cpu")
        made = torch.cat((half, -half))
    elif kind in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        made = every.to(torch.uint8).view(dtype).float()
    elif kind == "signed":
        made = torch.where(every < 1 << (bits - 1), every, every - (1 << bits)).float()
    elif kind == "offset":
        made = (every - (1 << (bits - 1))).float()
    elif kind == "unsigned":
        made = every.float()
    else:
        raise ValueError(f"codes are not of {kind!r}")
    return made.to(where)
