"""Scales as they are stored, as fp32."""

from __future__ import annotations

import torch

_BIAS = 127  # of the exponent of E8M0 (OCP Microscaling Formats v1.0, section 5.4.1)


def as_fp32(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of any dtype as contiguous fp32; uint8 holds exponents of two."""
    if scales.dtype == torch.uint8:
        exponents = scales.int() - _BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return scales.float().contiguous()
