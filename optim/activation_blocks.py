"""Packing of saved activations in blocks: an fp32 scale and 128 int8 codes.

The scale is the largest magnitude of the block over 126, so an element changes by at most half a
scale, ``max / 252``.  One that is rounded to zero keeps its sign, on which many operators depend
(ReLU): the codes 127 and -127 stand for a 64th of the scale.

A block with an element that is not finite becomes NaN as a whole.  The kernels for CPUs and GPUs
(csrc/cuda/activations.cu) and plain torch give the same bits; only those of NaN may differ.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cuda_kernels, kernels

BLOCK = 128  # elements
BLOCK_BYTES = BLOCK + 4
MOST_CODE, TINY_CODE, TINY = 126, 127, 2.0**-6
LEAST_MAGNITUDE = 1e-30  # of a block; below it, a block is all zeros
WINDOW = 1 << 21  # elements that are packed at once where packed bytes are staged
WINDOW_BYTES = WINDOW // BLOCK * BLOCK_BYTES
_EACH = 4  # elements of a GPU thread
_SOURCE = "activations.cu"


@dataclass(frozen=True)
class ActivationBlocks:
    """Packs bytes of one dtype (fp32, bf16 or fp16), and unpacks them."""

    dtype: torch.dtype

    def packed_bytes(self, nbytes: int) -> int:
        """Return the packed size of ``nbytes`` of memory."""
        numel = nbytes // self.dtype.itemsize
        return numel + (BLOCK_BYTES - BLOCK) * -(-numel // BLOCK)

    def pack(self, values: Tensor, packed: Tensor) -> None:
        """Fill ``packed`` from ``values``: both flat uint8 on one device, on its current stream.

        Both begin on a multiple of 16 bytes.

        Raises:
            ValueError: ``packed`` does not have the packed size of ``values``.
        """
        flat, numel = self._checked(values, packed)
        if kernels.NATIVE is not None and flat.device.type == "cpu":
            kind = kernels.FLOAT_TYPES[self.dtype]
            kernels.NATIVE.pack_activation(flat.data_ptr(), kind, numel, packed.data_ptr())
        elif serves(flat):
            self._launch("pack_activation", flat, packed)
        else:
            for part, blocks in _rows(flat, packed):
                _pack_plainly(part, blocks)

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        """Fill ``values`` from ``packed``; see ``pack``."""
        flat, numel = self._checked(values, packed)
        if kernels.NATIVE is not None and flat.device.type == "cpu":
            kind = kernels.FLOAT_TYPES[self.dtype]
            kernels.NATIVE.unpack_activation(packed.data_ptr(), numel, flat.data_ptr(), kind)
        elif serves(flat):
            self._launch("unpack_activation", flat, packed)
        else:
            for part, blocks in _rows(flat, packed):
                scale = blocks[:, :4].reshape(-1).clone().view(torch.float32).unsqueeze(1)
                codes = blocks[:, 4:].view(torch.int8)
                tiny = codes.abs() == TINY_CODE
                part.copy_(torch.where(tiny, codes.sign() * TINY, codes.float()) * scale)

    def windows(self, nbytes: int) -> Iterator[tuple[slice, slice]]:
        """Divide ``nbytes`` of memory into windows of at most ``WINDOW`` elements.

        Yields:
            The bytes of each window in memory, and packed.
        """
        each = WINDOW * self.dtype.itemsize
        for start in range(0, nbytes, each):
            stop, first = min(start + each, nbytes), self.packed_bytes(start)
            yield slice(start, stop), slice(first, first + self.packed_bytes(stop - start))

    def _checked(self, values: Tensor, packed: Tensor) -> tuple[Tensor, int]:
        kernels.check_flat("packed", packed, self.packed_bytes(values.numel()))
        flat = values.view(self.dtype)
        kernels.check_flat("values", flat, flat.numel())
        return flat, flat.numel()

    def _launch(self, kernel: str, flat: Tensor, packed: Tensor) -> None:
        numpy = importlib.import_module("numpy")
        numel, kind = numpy.uint64(flat.numel()), numpy.int32(kernels.FLOAT_TYPES[self.dtype])
        values, blocks = numpy.uint64(flat.data_ptr()), numpy.uint64(packed.data_ptr())
        packs = kernel == "pack_activation"
        given = (values, numel, blocks, kind) if packs else (blocks, numel, values, kind)
        if flat.numel():
            count = -(-flat.numel() // (cuda_kernels.THREADS * _EACH))
            cuda_kernels.launch(_SOURCE, kernel, count, given, flat)


def serves(tensor: Tensor) -> bool:
    """Return whether the GPU kernels can run where this tensor is."""
    return tensor.device.type == "cuda" and cuda_kernels.ready(_SOURCE)


def _rows(flat: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the whole blocks as rows of values and of packed bytes, then the rest as one row."""
    count = flat.numel() // BLOCK
    whole, rest = count * BLOCK, flat.numel() - count * BLOCK
    if count:
        yield flat[:whole].view(count, BLOCK), packed[: count * BLOCK_BYTES].view(count, -1)
    if rest:
        yield flat[whole:].view(1, rest), packed[count * BLOCK_BYTES :].view(1, 4 + rest)


def _pack_plainly(values: Tensor, blocks: Tensor) -> None:
    """Pack rows of values with plain torch operations."""
    values = values.float()
    most = values.abs().amax(1, keepdim=True)
    finite = torch.isfinite(most)
    whole = finite & (most >= LEAST_MAGNITUDE)
    scale = torch.where(whole, most / MOST_CODE, torch.where(finite, 0.0, torch.nan))
    inverse = torch.where(whole, torch.full_like(most, MOST_CODE) / most, 0.0)
    codes = torch.round(values * inverse)
    codes = torch.where((codes == 0) & (values != 0), values.sign() * TINY_CODE, codes)
    codes = torch.where(whole, codes, 0.0)
    blocks[:, :4].copy_(scale.view(torch.uint8))
    blocks[:, 4:].copy_(codes.to(torch.int8).view(torch.uint8))
