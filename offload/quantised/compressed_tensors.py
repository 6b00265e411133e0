"""compressed-tensors, as llm-compressor writes it: integers of 1 to 8 bits, fp8, fp4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..optim.quantised import Codes, Scaling, codes_of, dequantise, table_of
from .format_base import (
    Files,
    Format,
    QuantisedWeight,
    StoredTensor,
    is_in_order,
    require,
    stored,
    whole,
)
from .fp4 import Fp4
from .scaled import KINDS, weight

METHODS = ("compressed-tensors", "compressed_tensors")
FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_I32 = torch.int32


@dataclass(frozen=True)
class Packed(Format):
    """Integers of a few bits, each row a sequence of bits in 32-bit words (pack-quantized).

    Attributes:
        bits: of a code, which is an integer plus half of the range.
        groups, scale_rows: columns and rows of scales.
        zeros: dtype of zero points: int32 if they are packed; ``None``: there are none.
        grouped: whether ``g_idx`` assigns groups to columns.
    """

    kind: ClassVar[str] = "packed"
    bits: int
    groups: int
    scale_rows: int
    zeros: torch.dtype | None
    grouped: bool

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        rows, columns = self.shape
        found = {
            "codes": StoredTensor(_I32, (rows, -(-columns * self.bits // 32))),
            "scales": StoredTensor(self.dtype, (self.scale_rows, self.groups)),
        }
        if self.zeros == _I32:
            found["zeros"] = StoredTensor(_I32, (-(-rows * self.bits // 32), self.groups))
        elif self.zeros is not None:
            found["zeros"] = StoredTensor(self.zeros, (self.scale_rows, self.groups))
        return {**found, "g_idx": StoredTensor(_I32, (columns,))} if self.grouped else found

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        (rows, columns), scales = self.shape, tensors["scales"].float()
        words, zeros = tensors["codes"], tensors.get("zeros")
        if zeros is not None and self.zeros == _I32:
            by_group = zeros.t().contiguous()
            layout = Codes("rows", self.bits, self.groups, rows, 4 * by_group.shape[1])
            unsigned = codes_of(layout, by_group.reshape(-1).view(torch.uint8))
            zeros = unsigned.t().float() - (1 << (self.bits - 1))
        codes = Codes("rows", self.bits, rows, columns, 4 * words.shape[1])
        block = (rows if self.scale_rows == 1 else 1, -(-columns // self.groups))
        dequantise(
            codes, words.reshape(-1).view(torch.uint8),
            table_of("offset", self.bits, words.device), scales.contiguous(),
            Scaling(block, through=self.dtype), weight,
            zeros=None if zeros is None else zeros.float().contiguous(), index=tensors.get("g_idx"),
        )  # fmt: skip


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: one of them is incomplete, or in a format that cannot be read.
    """
    what = "of compressed-tensors cannot be read"
    for form in _formats(config):
        require(form in FORMATS, "format", f"{form!r} {what}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    require(sparsity == "dense", "sparsity", f"{sparsity!r} {what}")
    require(not config.get("transform_config"), "transform_config", what)
    schemes = [g.get("weights") or {} for g in _groups(config)]
    for name in files.names:
        if name.endswith(".weight_packed"):
            prefix = name.removesuffix(".weight_packed")
            if stored(files, name).dtype == _I32:
                yield _packed(files, prefix, schemes)
            else:
                yield _fp4(files, prefix)
        elif name.endswith(".weight") and set(files.dtypes(name)) & KINDS.keys():
            yield _eight_bits(files, name, schemes)


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = (config.get("config_groups") or {}).values()
    return [each for each in groups if isinstance(each, Mapping)]


def _formats(config: Mapping[str, Any]) -> list[str]:
    named = [config.get("format"), *(group.get("format") for group in _groups(config))]
    return [each for each in named if each is not None]


def _of_all(schemes: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Return the value that all groups of the configuration have, else ``None``."""
    values = [scheme.get(key) for scheme in schemes]
    return values[0] if values and all(value == values[0] for value in values) else None


def _eight_bits(files: Files, name: str, schemes: Sequence[Mapping[str, Any]]) -> QuantisedWeight:
    zeros, scales = f"{name}_zero_point", f"{name}_scale"
    block = _of_all(schemes, "block_structure")
    has_zeros = files.shape(zeros) is not None
    _require_zeros(has_zeros, zeros, schemes)
    powers = stored(files, scales).dtype == torch.uint8
    return weight(
        files, name, scales, block=None if block is None else tuple(block),
        zero_name=zeros if has_zeros else None, dtype=torch.bfloat16 if powers else None,
    )  # fmt: skip


def _require_zeros(found: bool, name: str, schemes: Sequence[Mapping[str, Any]]) -> None:
    require(found or _of_all(schemes, "symmetric") is not False, name, "is missing")


def _packed(files: Files, prefix: str, schemes: Sequence[Mapping[str, Any]]) -> QuantisedWeight:
    words = stored(files, f"{prefix}.weight_packed")
    scales = stored(files, f"{prefix}.weight_scale")
    require(len(words.shape) == 2, prefix, f"has packed codes of {words.shape}, not a matrix")
    stored(files, f"{prefix}.weight_shape")
    shape = tuple(files.read(f"{prefix}.weight_shape").tolist())
    require(len(shape) == 2 and shape[0] == words.shape[0], prefix, f"has weight_shape {shape}")
    rows, columns = shape
    given = {int(scheme["num_bits"]) for scheme in schemes if "num_bits" in scheme}
    fitting = [b for b in range(1, 9) if -(-columns * b // 32) == words.shape[1]]
    bits = [b for b in fitting if not given or b in given]
    require(
        len(bits) == 1, prefix,
        f"has {words.shape[1]} words for {columns} columns, and num_bits is {sorted(given)}",
    )  # fmt: skip
    scale_rows, groups = (1, 1) if len(scales.shape) < 2 else scales.shape
    fits = scale_rows in (1, rows) and groups and columns % groups == 0
    require(fits, prefix, f"of {shape} has scales of {scales.shape}")
    tensors = {"codes": f"{prefix}.weight_packed", "scales": f"{prefix}.weight_scale"}
    zeros, index = f"{prefix}.weight_zero_point", f"{prefix}.weight_g_idx"
    if files.shape(zeros) is not None:
        tensors["zeros"] = zeros
    _require_zeros("zeros" in tensors, zeros, schemes)
    grouped = not is_in_order(files, index, columns, groups, columns // groups)
    if grouped:
        tensors["g_idx"] = index
    kept = stored(files, zeros).dtype if "zeros" in tensors else None
    form = Packed(shape, scales.dtype, bits[0], groups, scale_rows, kept, grouped)
    others = (f"{prefix}.weight_shape", index)
    return whole(files, f"{prefix}.weight", form, tensors, others)


def _fp4(files: Files, prefix: str) -> QuantisedWeight:
    """Return a weight of NVFP4 (with a scale of all scales) or MXFP4."""
    tensors = {"codes": f"{prefix}.weight_packed", "scales": f"{prefix}.weight_scale"}
    codes, scales = stored(files, tensors["codes"]), stored(files, tensors["scales"])
    upper = f"{prefix}.weight_global_scale"
    if files.shape(upper) is not None:
        tensors["upper"] = upper
    require("upper" in tensors or scales.dtype == torch.uint8, upper, "is missing")
    form = Fp4.of(prefix, codes, scales, upper="divides" if "upper" in tensors else "none")
    return whole(files, f"{prefix}.weight", form, tensors)
