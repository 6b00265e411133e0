"""GPTQ: integers of 2, 3, 4 or 8 bits in groups along the inputs, possibly in order of activation.

``qweight`` has the codes of the transposed matrix in 32-bit words along the inputs.  ``g_idx``
assigns a group to every input.  Files of the first version store every zero point less one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    UnreadableFormat,
    is_in_order,
    require,
    stored,
    whole,
)

METHODS = ("gptq",)
VERSIONS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 0}  # what is added to zero points, by format
_I32 = torch.int32


@dataclass(frozen=True)
class Gptq(Format):
    """A weight of GPTQ.

    Attributes:
        bits: of a code.
        groups: scales of a row.
        zero_shift: what is added to stored zero points.
        block: inputs that share a scale; 0: ``g_idx`` says which.
    """

    kind: ClassVar[str] = "gptq"
    bits: int
    groups: int
    zero_shift: int
    block: int

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        rows, columns = self.shape
        found = {
            "qweight": StoredTensor(_I32, (-(-columns * self.bits // 32), rows)),
            "qzeros": StoredTensor(_I32, (self.groups, -(-rows * self.bits // 32))),
            "scales": StoredTensor(self.dtype, (self.groups, rows)),
        }
        return found if self.block else {**found, "g_idx": StoredTensor(_I32, (columns,))}

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        rows, columns = self.shape
        scales, packed = tensors["scales"], tensors["qzeros"]
        layout = Codes("rows", self.bits, self.groups, rows, 4 * packed.shape[1])
        zeros = codes_of(layout, packed.reshape(-1).view(torch.uint8)).int() + self.zero_shift
        zeros &= (1 << self.bits) - 1  # the shift wraps around
        codes = Codes("interleaved", self.bits, rows, columns)
        dequantise(
            codes, tensors["qweight"].reshape(-1).view(torch.uint8),
            table_of("unsigned", self.bits, scales.device), scales.t().float().contiguous(),
            Scaling((1, self.block or columns), through=self.dtype), weight,
            zeros=zeros.t().float().contiguous(), index=tensors.get("g_idx"),
        )  # fmt: skip


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: one of them is incomplete, or the configuration is.
    """
    version = config.get("checkpoint_format") or config.get("format")
    require(
        version in VERSIONS and not config.get("is_marlin_format"), "checkpoint_format",
        f"is {version!r}; GPTQ folders of formats 'gptq' and 'gptq_v2' can be read",
    )  # fmt: skip
    for key in ("dynamic", "rotation"):
        require(not config.get(key), "quantization_config", f"has {key}, which cannot be read")
    for name in files.names:
        if name.endswith(".qweight"):
            yield _weight(files, name.removesuffix(".qweight"), VERSIONS[version], config)


def _weight(
    files: Files, prefix: str, zero_shift: int, config: Mapping[str, Any]
) -> QuantisedWeight:
    bits = config.get("bits")
    if bits not in (2, 3, 4, 8):
        raise UnreadableFormat(f"{prefix} has codes of {bits!r} bits; 2, 3, 4 and 8 can be read")
    words, scales = stored(files, f"{prefix}.qweight"), stored(files, f"{prefix}.scales")
    if len(words.shape) != 2 or len(scales.shape) != 2:
        raise UnreadableFormat(f"{prefix} has tensors of {words.shape} and {scales.shape}")
    groups, rows = scales.shape
    columns = words.shape[0] * 32 // bits
    tensors = {key: f"{prefix}.{key}" for key in ("qweight", "qzeros", "scales")}
    block = _block(config, prefix, columns, groups)
    index = f"{prefix}.g_idx"
    if files.shape(index) is None:
        require(not config.get("desc_act"), index, "is missing, and desc_act is set")
    if not is_in_order(files, index, columns, groups, block):
        block, tensors["g_idx"] = 0, index
    form = Gptq((rows, columns), scales.dtype, bits, groups, zero_shift, block)
    return whole(files, f"{prefix}.weight", form, tensors, (index,))


def _block(config: Mapping[str, Any], prefix: str, columns: int, groups: int) -> int:
    """Return how many columns share a scale."""
    given = config.get("group_size")
    if given is None:
        require(
            groups and columns % groups == 0, prefix, f"has {groups} groups of {columns} inputs"
        )
        return columns // groups
    block = columns if given == -1 else int(given)
    fits = block > 0 and groups == -(-columns // block)
    require(fits, f"{prefix}.scales", f"has {groups} groups, and group_size is {given}")
    return block
