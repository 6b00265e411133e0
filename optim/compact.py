"""Compact moments in plain torch: bf16 with stochastic rounding, and int8 with a scale per block.

The same arithmetic as the native kernels, bit for bit.  An int8 code is the upper bits of a float:
eight codes an octave, shifted so that code 0 is exactly zero.  ``value = (float(code) - zero) *
scale``, so encoding is one addition and one shift, with no table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import BLOCK, INFINITY, MAGNITUDE

WORD = 0xFFFFFFFF
CODE_SHIFT = 20
CODE_NOISE = (1 << CODE_SHIFT) - 1
SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True)
class CodeMap:
    """One byte map: ``zero_code`` is the upper bits of the float ``zero``; ``top`` the largest y."""

    zero_code: int
    zero: float
    top: float
    largest: int
    signed: bool


SIGNED = CodeMap((127 - 16) << 3, 2.0**-16, 0.9375 - 2.0**-16, 127, True)
UNSIGNED = CodeMap((127 - 32) << 3, 2.0**-32, 0.9375, 255, False)


def noise_at(position: int, numel: int, key: int, device: torch.device) -> Tensor:
    """32 bits of noise for each of ``numel`` elements from ``position`` on, as int64.

    A hash of position and key, so it does not depend on how a buffer is cut.
    """
    index = torch.arange(position & WORD, (position & WORD) + numel, device=device)
    x = (index & WORD) ^ key
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def noise_key(step: int, seed: int = 0) -> int:
    """The 32-bit key of one step's rounding noise (the same hash, in Python integers)."""
    x = (step * 0x9E3779B9 + seed * 0x85EBCA6B) & WORD
    x ^= x >> 16
    x = (x * 0x7FEB352D) & WORD
    x ^= x >> 15
    x = (x * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def to_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bf16, rounded up with the probability that keeps the mean (16 bits of ``noise``)."""
    raw = value.view(torch.int32)
    size = raw & MAGNITUDE
    kept = torch.where(size > INFINITY, (raw >> 16) | 0x40, raw >> 16)
    rounded = (raw + (noise & 0xFFFF).to(torch.int32)) >> 16
    return torch.where(size >= INFINITY, kept, rounded).to(torch.int16).view(torch.bfloat16)


def _codes_to_float(codes: Tensor, kind: CodeMap) -> Tensor:
    raw = codes.to(torch.int32)
    size = raw & 0x7F if kind.signed else raw
    value = ((size + kind.zero_code) << CODE_SHIFT).view(torch.float32) - kind.zero
    return torch.where(raw >= 0x80, -value, value) if kind.signed else value


def _per_block(scale: Tensor, numel: int) -> Tensor:
    return scale.repeat_interleave(BLOCK)[:numel]


def from_int8(codes: Tensor, scale: Tensor, kind: CodeMap) -> Tensor:
    """fp32 of a byte moment: ``codes`` uint8 [n], ``scale`` fp32 [ceil(n / BLOCK)]."""
    return _codes_to_float(codes, kind) * _per_block(scale, codes.numel())


def to_int8(value: Tensor, noise: Tensor, kind: CodeMap) -> tuple[Tensor, Tensor]:
    """Byte codes and block scales of an fp32 moment; 20 bits of ``noise`` round it without bias."""
    numel = value.numel()
    raw = value.view(torch.int32)
    padded = torch.nn.functional.pad(raw & MAGNITUDE, (0, -numel % BLOCK))
    most = padded.view(-1, BLOCK).amax(1).view(torch.float32)
    # Tensors throughout: dividing by a number would multiply by its reciprocal on some devices.
    scale = most / torch.full_like(most, kind.top)
    scale = torch.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    inverse = torch.ones_like(scale) / scale
    y = (raw & MAGNITUDE).view(torch.float32) * _per_block(inverse, numel) + kind.zero
    bits = y.view(torch.int32).to(torch.int64) & WORD
    code = ((bits + (noise & CODE_NOISE)) & WORD) >> CODE_SHIFT
    code = code.clamp_max(kind.zero_code + kind.largest)
    if kind.signed:
        code = (code - kind.zero_code) | ((raw.to(torch.int64) >> 24) & 0x80)
    else:
        # A square that is not zero is never stored as zero.
        least = torch.where(raw != 0, kind.zero_code + 1, kind.zero_code)
        code = torch.maximum(code, least) - kind.zero_code
    return code.to(torch.uint8), scale
