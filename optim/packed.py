"""Formats that frozen weights are kept and moved in: int8 by rows, nf4 with double quantisation.

``nf4`` is that of QLoRA (https://arxiv.org/abs/2305.14314, appendix E): blocks of 64 elements, each
coded by the nearest of sixteen quantiles of a normal distribution times the block's largest size;
these scales, less their mean, in bytes, 256 of which share a scale of their own.  4.13 bits an
element.  ``int8``: a byte an element, and the largest size of every row.

A weight becomes what the arithmetic here says, in fp32, rounded to its dtype: the same bits from
the native kernels, on a GPU, and in plain torch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import kernels, packed_device
from .packed_layout import BLOCK, SCALES, WINDOW, Parts

STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_SMALLEST = 1e-38  # of a largest size: its reciprocal is finite
_ZERO = NF4.index(0.0)


def _part(page: Tensor, at: int, dtype: torch.dtype, count: int) -> Tensor:
    return page[at : at + count * dtype.itemsize].view(dtype)


@functools.cache
def _scale_codes() -> Tensor:
    """The 256 values that a scale's byte stands for, fp32 and sorted: the dynamic type of
    https://arxiv.org/abs/1511.04561, seven decades of sizes with 1 to 64 values each."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        for k in range(count):
            size = (0.1 + 0.9 * (k + 0.5) / count) * 10.0 ** (decade - 6)
            values += [size, -size]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


@functools.cache
def _table(name: str, where: torch.device) -> Tensor:
    """``nf4`` or ``scales``: what codes stand for."""
    made = torch.tensor(NF4, dtype=torch.float32, device="cpu") if name == "nf4" else _scale_codes()
    return made.to(where)


# -- packing --------------------------------------------------------------------------------------


def pack(parts: Parts, weight: Tensor, page: Tensor) -> None:
    """Packs ``weight``, of any float dtype, into ``page``: uint8, flat, on a border of 64 bytes;
    both on the CPU.

    Raises:
        ValueError: it is not finite, or they do not fit.
    """
    flat = weight.detach().reshape(-1)
    if flat.dtype not in kernels.FLOAT_TYPES:
        flat = flat.float()
    kernels.check_flat("weight", flat, parts.numel)
    kernels.check_flat("page", page, parts.nbytes)
    page.zero_()
    if not parts.numel:
        return
    if parts.form == "int8":
        finite = _pack_int8(parts, flat, page)
    else:
        finite = _pack_nf4(parts, flat, page)
    if not finite:
        raise ValueError(f"a weight that is not finite, or nearly, cannot be kept as {parts.form}")


def _pack_int8(parts: Parts, flat: Tensor, page: Tensor) -> bool:
    codes = _part(page, 0, torch.int8, parts.numel)
    scales = _part(page, parts.scales, torch.float32, parts.rows)
    if kernels.NATIVE is not None:
        kind = kernels.FLOAT_TYPES[flat.dtype]
        given = flat.data_ptr(), kind, parts.rows, parts.columns
        return bool(kernels.NATIVE.pack_int8(*given, codes.data_ptr(), scales.data_ptr()))
    rows = flat.float().view(parts.rows, parts.columns)
    most = rows.abs().amax(1)
    if not bool(torch.isfinite(most).all()):
        return False
    inverse = torch.full_like(most, 127.0) / most.clamp_min(_SMALLEST)
    codes.copy_(torch.round(rows * inverse.unsqueeze(1)).view(-1))
    scales.copy_(most)
    return True


def _pack_nf4(parts: Parts, flat: Tensor, page: Tensor) -> bool:
    pairs = _part(page, 0, torch.uint8, -(-parts.numel // 2))
    table = _table("nf4", flat.device)
    if kernels.NATIVE is not None:
        scales = torch.empty(parts.blocks, dtype=torch.float32, device="cpu")
        edges = _edges(table)
        given = flat.data_ptr(), kernels.FLOAT_TYPES[flat.dtype], parts.numel, edges.data_ptr()
        if not kernels.NATIVE.pack_nf4(*given, pairs.data_ptr(), scales.data_ptr()):
            return False
    else:
        codes, scales = _nearest(flat.float(), BLOCK, table)
        if not bool(torch.isfinite(scales).all()):
            return False
        padded = torch.nn.functional.pad(codes, (0, codes.numel() % 2), value=_ZERO).view(-1, 2)
        pairs.copy_((padded[:, 0] << 4) | padded[:, 1])
    mean = scales.mean()
    scale_codes, upper = _nearest(scales - mean, SCALES, _table("scales", flat.device))
    _part(page, parts.scale_codes, torch.uint8, parts.blocks).copy_(scale_codes)
    _part(page, parts.scales, torch.float32, upper.numel()).copy_(upper)
    _part(page, parts.offset, torch.float32, 1).copy_(mean)
    # A scale that was rounded up may be more than the dtype can hold.
    return bool((_nf4_scales(parts, page).abs() <= torch.finfo(flat.dtype).max).all())


def _edges(table: Tensor) -> Tensor:
    """Those between two entries each."""
    return (table[:-1] + table[1:]) / 2


def _nearest(values: Tensor, block: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """For each of ``values`` the number of the entry that comes nearest to it over the largest size
    of its block, and these sizes."""
    numel = values.numel()
    padded = torch.nn.functional.pad(values, (0, -numel % block)).view(-1, block)
    most = padded.abs().amax(1)
    inverse = torch.ones_like(most) / most.clamp_min(_SMALLEST)
    codes = torch.bucketize(padded * inverse.unsqueeze(1), _edges(table), out_int32=True)
    return codes.view(-1)[:numel].to(torch.uint8), most


# -- unpacking ------------------------------------------------------------------------------------


def unpack(parts: Parts, page: Tensor, weight: Tensor) -> None:
    """Fills ``weight`` (flat, contiguous, of any float dtype) from ``page`` (uint8, flat, beginning
    on a multiple of 64 bytes), both on one device; on a GPU on torch's current stream.

    Raises:
        ValueError: they do not fit.
    """
    kernels.check_flat("weight", weight, parts.numel)
    kernels.check_flat("page", page, parts.nbytes)
    if weight.dtype not in kernels.FLOAT_TYPES or page.dtype is not torch.uint8:
        raise ValueError(f"cannot unpack {page.dtype} to {weight.dtype}")
    if not weight.numel():
        return
    if weight.device.type == "cpu" and kernels.NATIVE is not None:
        _unpack_native(parts, page, weight)
    elif packed_device.serves(weight):
        nf4, scales = _table("nf4", page.device), _table("scales", page.device)
        packed_device.unpack(parts, page, weight, nf4, scales)
    else:
        _unpack_plainly(parts, page, weight)


def _unpack_native(parts: Parts, page: Tensor, weight: Tensor) -> None:
    base, to = page.data_ptr(), weight.data_ptr()
    kind = kernels.FLOAT_TYPES[weight.dtype]
    assert kernels.NATIVE is not None
    if parts.form == "int8":
        kernels.NATIVE.unpack_int8(base, base + parts.scales, parts.rows, parts.columns, to, kind)
        return
    nf4, scales = _table("nf4", page.device), _table("scales", page.device)
    kernels.NATIVE.unpack_nf4(
        base, base + parts.scale_codes, base + parts.scales, nf4.data_ptr(), scales.data_ptr(),
        float(_part(page, parts.offset, torch.float32, 1)), parts.numel, to, kind,
    )  # fmt: skip


def _unpack_plainly(parts: Parts, page: Tensor, weight: Tensor) -> None:
    """Unpack with plain torch operations, a window at a time to keep indices small."""
    if parts.form == "int8":
        scales = _part(page, parts.scales, torch.float32, parts.rows)
        rows = max(1, WINDOW // max(1, parts.columns))
        for first in range(0, parts.rows, rows):
            last = min(first + rows, parts.rows)
            start, stop = first * parts.columns, last * parts.columns
            codes = page[start:stop].view(torch.int8).view(-1, parts.columns)
            made = codes * scales[first:last].unsqueeze(1) * STEP
            weight[start:stop].copy_(made.view(-1))
        return
    scales = _nf4_scales(parts, page)
    table = _table("nf4", page.device)
    many = 64 * WINDOW
    for start in range(0, parts.numel, many):
        stop = min(start + many, parts.numel)
        pairs = page[start // 2 : -(-stop // 2)].to(torch.int32)
        codes = torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[: stop - start]
        each = scales[start // BLOCK : -(-stop // BLOCK)].repeat_interleave(BLOCK)[: stop - start]
        weight[start:stop].copy_(table[codes] * each)


def _nf4_scales(parts: Parts, page: Tensor) -> Tensor:
    """The scale of each block, fp32."""
    codes = _part(page, parts.scale_codes, torch.uint8, parts.blocks).to(torch.int32)
    upper = _part(page, parts.scales, torch.float32, -(-parts.blocks // SCALES))
    each = upper.repeat_interleave(SCALES)[: parts.blocks]
    offset = _part(page, parts.offset, torch.float32, 1)
    return _table("scales", page.device)[codes] * each + offset
