"""Compact moments in plain torch: bf16 with stochastic rounding, and int8 with a scale per block.

The same arithmetic as the native kernels, bit for bit.  An int8 code is the upper bits of a float:
eight codes an octave, shifted so that code 0 is exactly zero.  Then ``value = (y(code) - zero) *
scale``, and encoding is one addition and one shift, with no table.  ``y`` and ``zero`` have the
sign of the value.
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

    Within a block the noise is the van der Corput sequence (an element's number with its bits
    reversed), which is spread more evenly than random numbers, xored with a hash of block, moment
    and step.  So an element's noise is uniform and independent from step to step, and does not
    depend on how a buffer is cut.

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
        reversed_bits = torch.zeros_like(index)
        for bit in range(8):
            reversed_bits |= ((index >> bit) & 1) << (7 - bit)
        return (start & ((1 << count) - 1)) ^ (reversed_bits << (count - 8))


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


def _zero(like: Tensor, kind: CodeMap) -> Tensor:
    zero = torch.full_like(like, kind.zero)
    return torch.copysign(zero, like) if kind.signed else zero


def _codes_to_float(codes: Tensor, kind: CodeMap) -> Tensor:
    raw = codes.to(torch.int32)
    y = (((raw & kind.mask) | kind.zero_bits) << CODE_SHIFT).view(torch.float32)
    if kind.signed:
        y = torch.where(raw >= 0x80, -y, y)
    return y - _zero(y, kind)


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
    y = value * _per_block(inverse, numel)
    raw = (y + _zero(y, kind)).view(torch.int32).to(torch.int64) & WORD
    raw = (raw + noise.bits(numel, CODE_SHIFT, value.device)) & WORD
    code = (raw >> CODE_SHIFT) & kind.mask
    if kind.signed:
        return (code | ((raw >> 24) & 0x80)).to(torch.uint8), scale
    # Where a block has a square that is not zero, none is stored as zero.
    least = _per_block((most.view(torch.int32) != 0).to(torch.int64), numel)
    return torch.maximum(code, least).to(torch.uint8), scale


def as_it_was(value: Tensor, kind: CodeMap) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by block, whether ``from_int8`` produced ``value``, and its codes and scales then.

    For other blocks codes and scales are meaningless.

    The largest element of a block has the largest code or, if its noise was almost zero, the one
    below.  So the scale is known except for the last bit, unless it is the smallest scale.  Every
    element then has to be reproduced exactly.
    """
    numel = value.numel()
    blocks = torch.nn.functional.pad(value, (0, -numel % BLOCK)).view(-1, BLOCK)
    most = blocks.abs().amax(1)
    scales = [torch.full_like(most, SMALLEST_SCALE)]
    for largest in (1.875, 1.75):
        nearest = most / torch.full_like(most, largest - kind.zero)
        scales += [nearest, nearest.nextafter(most), nearest.nextafter(torch.zeros_like(most))]
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    scale, found = torch.zeros_like(most), torch.zeros_like(most, dtype=torch.bool)
    for tried in scales:
        y = blocks / tried.clamp_min(SMALLEST_SCALE)[:, None]
        raw = (y + _zero(y, kind)).view(torch.int32).to(torch.int64) & WORD
        raw += 1 << (CODE_SHIFT - 1)  # to the nearest
        code = (raw >> CODE_SHIFT) & kind.mask
        if kind.signed:
            code |= (raw >> 24) & 0x80
        code = code.to(torch.uint8)
        again = from_int8(code.reshape(-1), tried, kind).view_as(blocks)
        same = (again == blocks).all(1) & ~found & (most != 0)
        codes[same], scale[same] = code[same], tried[same]
        found |= same
    return found, codes.reshape(-1)[:numel], scale
