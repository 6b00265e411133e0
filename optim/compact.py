"""Compact moments in plain torch: bf16 with stochastic rounding, and int8 with a scale per block.

The same arithmetic as the native kernels, bit for bit.  An int8 code is the upper bits of a float:
eight codes an octave, shifted so that code 0 is exactly zero.  Then ``value = (y(code) - zero) *
scale``, and encoding is one addition and one shift, with no table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import BLOCK, INFINITY, MAGNITUDE

WORD = 0xFFFFFFFF
CODE_SHIFT = 20
GOLDEN = 0x9E3779B9
SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True)
class CodeMap:
    """One byte map: ``zero_bits`` are the upper bits of the float ``zero``, ``top`` the largest y,
    and ``mask`` has the bits of a code's size."""

    zero_bits: int
    zero: float
    top: float
    mask: int
    signed: bool


SIGNED = CodeMap(112 << 3, 2.0**-15, 1.875 - 2.0**-14, 0x7F, True)
UNSIGNED = CodeMap(96 << 3, 2.0**-31, 1.875 - 2.0**-18, 0xFF, False)
LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def _hash(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Noise:
    """Where a stretch of a moment starts: what its rounding noise is a function of.

    Within a block the noise is a golden-ratio sequence, spread more evenly than random numbers,
    from a start that is a hash of block, moment and step.  So an element's noise is uniform and
    independent from step to step, and does not depend on how a buffer is cut.

    Attributes:
        position: index of the first element in its whole buffer.
        moment: the moment's number in its rule.
        key: the step's key (see ``noise_key``).
    """

    position: int
    moment: int
    key: int

    def bits(self, numel: int, count: int, device: torch.device) -> Tensor:
        """``count`` bits (16 or 20) for each of ``numel`` elements, as int64."""
        index = torch.arange(self.position, self.position + numel, device=device)
        start = _hash((((index // BLOCK) * 4 + self.moment) & WORD) ^ self.key)
        return (start + (index % BLOCK) * (GOLDEN >> (32 - count))) & ((1 << count) - 1)


def noise_key(step: int, seed: int = 0) -> int:
    """The 32-bit key of one step's rounding noise (the same hash, in Python integers)."""
    x = (step * GOLDEN + seed * 0x85EBCA6B) & WORD
    x ^= x >> 16
    x = (x * 0x7FEB352D) & WORD
    x ^= x >> 15
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def to_bf16(value: Tensor, noise: Noise) -> Tensor:
    """fp32 to bf16, rounded up with the probability that keeps the mean (by ``noise``)."""
    raw = value.view(torch.int32)
    size = raw & MAGNITUDE
    kept = torch.where(size > INFINITY, (raw >> 16) | 0x40, raw >> 16)
    added = noise.bits(value.numel(), 16, value.device).to(torch.int32)
    rounded = (raw + added) >> 16
    return torch.where(size >= INFINITY, kept, rounded).to(torch.int16).view(torch.bfloat16)


def _codes_to_float(codes: Tensor, kind: CodeMap) -> Tensor:
    raw = codes.to(torch.int32)
    size = (raw & kind.mask) | kind.zero_bits
    value = (size << CODE_SHIFT).view(torch.float32) - kind.zero
    return torch.where(raw >= 0x80, -value, value) if kind.signed else value


def _per_block(scale: Tensor, numel: int) -> Tensor:
    return scale.repeat_interleave(BLOCK)[:numel]


def from_int8(codes: Tensor, scale: Tensor, kind: CodeMap) -> Tensor:
    """fp32 of a byte moment: ``codes`` uint8 [n], ``scale`` fp32 [ceil(n / BLOCK)]."""
    return _codes_to_float(codes, kind) * _per_block(scale, codes.numel())


def to_int8(value: Tensor, noise: Noise, kind: CodeMap) -> tuple[Tensor, Tensor]:
    """Byte codes and block scales of an fp32 moment; ``noise`` rounds it without bias."""
    numel = value.numel()
    raw = value.view(torch.int32)
    padded = torch.nn.functional.pad(raw & MAGNITUDE, (0, -numel % BLOCK))
    most = padded.view(-1, BLOCK).amax(1).view(torch.float32)
    # Tensors throughout: dividing by a number would multiply by its reciprocal on some devices.
    scale = most / torch.full_like(most, kind.top)
    scale = torch.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    inverse = torch.ones_like(scale) / scale
    size = raw & MAGNITUDE if kind.signed else raw
    y = size.view(torch.float32) * _per_block(inverse, numel) + kind.zero
    bits = y.view(torch.int32).to(torch.int64) & WORD
    bits = bits + noise.bits(numel, CODE_SHIFT, value.device)
    code = (bits & WORD) >> CODE_SHIFT
    if kind.signed:
        code = (code & kind.mask) | ((raw.to(torch.int64) >> 24) & 0x80)
    else:
        # A square that is not zero is never stored as zero.
        code = torch.where(raw != 0, code.clamp_min(kind.zero_bits + 1), code) & kind.mask
    return code.to(torch.uint8), scale
