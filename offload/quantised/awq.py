"""AWQ (version ``gemm``): 4-bit codes along the outputs, in groups along the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..optim.quantised import Codes, Scaling, codes_of, dequantise, table_of
from .format_base import Files, Format, QuantisedWeight, StoredTensor, require, stored, whole

METHODS = ("awq",)


@dataclass(frozen=True)
class Awq(Format):
    """A weight of AWQ; ``groups``: scales of a row."""

    kind: ClassVar[str] = "awq"
    groups: int

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        rows, columns = self.shape
        return {
            "qweight": StoredTensor(torch.int32, (columns, rows // 8)),
            "qzeros": StoredTensor(torch.int32, (self.groups, rows // 8)),
            "scales": StoredTensor(self.dtype, (self.groups, rows)),
        }

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        rows, columns = self.shape
        scales, packed = tensors["scales"], tensors["qzeros"].reshape(-1).view(torch.uint8)
        zeros = codes_of(Codes("awq", 4, rows, self.groups), packed)
        dequantise(
            Codes("awq", 4, rows, columns), tensors["qweight"].reshape(-1).view(torch.uint8),
            table_of("unsigned", 4, scales.device), scales.t().float().contiguous(),
            Scaling((1, columns // self.groups), through=self.dtype), weight,
            zeros=zeros.float().contiguous(),
        )  # fmt: skip


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: one of them is incomplete, or they are of another version.
    """
    bits = config.get("bits", 4)
    version = config.get("version") or config.get("format") or config.get("checkpoint_format")
    version = str(version or "gemm").lower()
    require(version == "gemm", "version", f"of AWQ is {version!r}; 'gemm' can be read")
    require(bits == 4, "bits", f"of AWQ are {bits!r}; 4 can be read")
    for name in files.names:
        if name.endswith(".qweight"):
            yield _weight(files, name.removesuffix(".qweight"))


def _weight(files: Files, prefix: str) -> QuantisedWeight:
    words, scales = stored(files, f"{prefix}.qweight"), stored(files, f"{prefix}.scales")
    good = len(words.shape) == len(scales.shape) == 2 and scales.shape[1] == 8 * words.shape[1]
    require(
        good and scales.shape[0] and words.shape[0] % scales.shape[0] == 0, prefix,
        f"has codes of {words.shape} and scales of {scales.shape}, which do not fit together",
    )  # fmt: skip
    (columns, groups), rows = (words.shape[0], scales.shape[0]), scales.shape[1]
    form = Awq((rows, columns), scales.dtype, groups)
    tensors = {key: f"{prefix}.{key}" for key in form.tensors}
    return whole(files, f"{prefix}.weight", form, tensors)
