"""Weights in another float dtype than the model's: they are only cast.

fp8 files without scales, as for image models, are of this format; so are plain tensors, such as
norms in fp32, beside quantised ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from .format_base import Format, StoredTensor


@dataclass(frozen=True)
class Cast(Format):
    """Values of ``dtype``, as torch casts them."""

    kind: ClassVar[str] = "cast"

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        return {"values": StoredTensor(self.dtype, self.shape)}

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        weight.copy_(tensors["values"].reshape(-1))
