"""FP4 (E2M1) in blocks: NVFP4 of ModelOpt and compressed-tensors, and MXFP4 of gpt-oss and others.

Two codes per byte, the first in the lower half.  NVFP4: 16 elements share an fp8 scale, and all
scales share an fp32 one.  MXFP4: 32 elements share a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..optim.quantised import Codes, Scaling, dequantise, table_of
from .format_base import (
    Files,
    Format,
    QuantisedWeight,
    StoredTensor,
    TensorSource,
    WeightPiece,
    as_fp32,
    require,
    stored,
)

METHODS = ("mxfp4",)
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Fp4(Format):
    """A weight of E2M1 codes.

    Attributes:
        rows, columns: of the matrix of codes.
        block: columns that share a scale.
        scales: dtype of the scales; uint8: powers of two.
        upper: what the scales' own scale does: ``"none"``, ``"multiplies"``, ``"divides"``.
        transposed: whether the weight is the transposed matrix.
    """

    kind: ClassVar[str] = "fp4"
    rows: int
    columns: int
    block: int
    scales: torch.dtype
    upper: str
    transposed: bool = False

    @classmethod
    def of(cls, name: str, codes: StoredTensor, scales: StoredTensor, *, upper: str) -> Fp4:
        """Return the format of a matrix with these tensors.

        Raises:
            UnreadableFormat: they do not fit together.
        """
        fits = (
            codes.dtype == torch.uint8 and len(codes.shape) == len(scales.shape) == 2
            and codes.shape[0] == scales.shape[0] and scales.shape[1]
            and 2 * codes.shape[1] % scales.shape[1] == 0
        )  # fmt: skip
        require(fits, name, f"has fp4 codes of {codes.shape} and scales of {scales.shape}")
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        block = columns // scales.shape[1]
        return cls((rows, columns), torch.bfloat16, rows, columns, block, scales.dtype, upper)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        found = {
            "codes": StoredTensor(torch.uint8, (self.rows, self.columns // 2)),
            "scales": StoredTensor(self.scales, (self.rows, self.columns // self.block)),
        }
        return (
            found if self.upper == "none" else {**found, "upper": StoredTensor(torch.float32, ())}
        )

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        data, scales = tensors["codes"].reshape(-1), as_fp32(tensors["scales"])
        if self.upper == "multiplies":
            scales = scales * tensors["upper"]
        elif self.upper == "divides":
            scales = scales / tensors["upper"]
        codes = Codes("rows", 4, self.rows, self.columns, self.columns // 2)
        scaling = Scaling((1, self.block), through=self.dtype, transposed=self.transposed)
        dequantise(codes, data, table_of("e2m1", 4, data.device), scales, scaling, weight)


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of gpt-oss' MXFP4.

    Raises:
        UnreadableFormat: one of them is incomplete.
    """
    for name in files.names:
        if name.endswith(_BLOCKS):
            yield _stack(files, name.removesuffix(_BLOCKS))


def _stack(files: Files, name: str) -> QuantisedWeight:
    """Return a stack of experts ``[experts, in, out]``, whose codes are ``[experts, out, in]``."""
    blocks, scales = stored(files, name + _BLOCKS), stored(files, name + _SCALES)
    fits = len(blocks.shape) == 4 and blocks.shape[:3] == scales.shape
    fits &= blocks.dtype == scales.dtype == torch.uint8
    require(fits, name, f"has blocks of {blocks.shape} and scales of {scales.shape}")
    experts, rows, groups, half = blocks.shape
    columns = groups * half * 2
    form = Fp4(
        (columns, rows), torch.bfloat16, rows, columns, 2 * half, scales.dtype, "none",
        transposed=True,
    )  # fmt: skip
    pieces = []
    for expert in range(experts):
        sources = {
            key: TensorSource(tensor, expert * form.tensors[key].nbytes)
            for key, tensor in (("codes", name + _BLOCKS), ("scales", name + _SCALES))
        }
        pieces.append(WeightPiece(expert * form.numel, form, sources))
    return QuantisedWeight(name, (experts, columns, rows), form.dtype, tuple(pieces))
