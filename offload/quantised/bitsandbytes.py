"""bitsandbytes: 4-bit blocks (nf4, fp4), with scales that may be quantised too, and int8 rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..optim.kernels import FLOAT_TYPES
from ..optim.packed import STEP
from ..optim.quantised import Codes, Scaling, dequantise, table_of
from .format_base import (
    Files,
    Format,
    QuantisedWeight,
    StoredTensor,
    UnreadableFormat,
    require,
    stored,
    whole,
)

METHODS = ("bitsandbytes",)
STATE = ".quant_state.bitsandbytes__"
_F32, _U8 = torch.float32, torch.uint8


@dataclass(frozen=True)
class FourBit(Format):
    """A weight of ``Linear4bit``: blocks of codes along the flat weight.

    With double quantisation, a block's scale is a code for ``nested_block`` scales that share one
    of their own, plus ``nested_offset`` (https://arxiv.org/abs/2305.14314, section 3).
    """

    kind: ClassVar[str] = "bitsandbytes-4bit"
    block: int
    nested_block: int
    nested_offset: float
    storage: torch.dtype
    stored_shape: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """How many scales there are."""
        return -(-self.numel // self.block)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        found = {
            "codes": StoredTensor(self.storage, self.stored_shape),
            "quant_map": StoredTensor(_F32, (16,)),
        }
        if not self.nested_block:
            return {**found, "absmax": StoredTensor(_F32, (self.blocks,))}
        return {
            **found,
            "absmax": StoredTensor(_U8, (self.blocks,)),
            "nested_absmax": StoredTensor(_F32, (-(-self.blocks // self.nested_block),)),
            "nested_quant_map": StoredTensor(_F32, (256,)),
        }

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        scales = tensors["absmax"]
        if self.nested_block:
            upper = tensors["nested_absmax"].repeat_interleave(self.nested_block)[: self.blocks]
            scales = tensors["nested_quant_map"][scales.int()] * upper + self.nested_offset
        data = tensors["codes"].reshape(-1).view(_U8)
        codes = Codes("halves", 4, 1, self.numel, data.numel())
        scaling = Scaling((1, self.block), through=self.dtype)
        dequantise(codes, data, tensors["quant_map"], scales.view(1, -1), scaling, weight)


@dataclass(frozen=True)
class Int8(Format):
    """A weight of ``Linear8bitLt``: a byte an element, and the largest magnitude of each row."""

    kind: ClassVar[str] = "bitsandbytes-int8"

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        rows, columns = self.shape
        return {
            "codes": StoredTensor(torch.int8, (rows, columns)),
            "SCB": StoredTensor(_F32, (rows,)),
        }

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        rows, columns = self.shape
        data = tensors["codes"].reshape(-1).view(_U8)
        codes = Codes("rows", 8, rows, columns, columns)
        scaling = Scaling((1, max(1, columns)), factor=STEP)
        table = table_of("signed", 8, data.device)
        dequantise(codes, data, table, tensors["SCB"].view(-1, 1), scaling, weight)


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: one of them is incomplete.
    """
    for name in files.names:
        if STATE in name:
            yield _four_bit(files, name, name.partition(STATE)[0])
        elif name.endswith(".SCB"):
            yield _int8(files, name.removesuffix(".SCB"))


def _four_bit(files: Files, state_name: str, name: str) -> QuantisedWeight:
    try:
        state = json.loads(bytes(files.read(state_name).tolist()))
        shape, dtype = tuple(state["shape"]), getattr(torch, state["dtype"])
        block, kind = int(state["blocksize"]), state["quant_type"]
        nested = int(state.get("nested_blocksize", 0))
        offset = float(state["nested_offset"]) if nested else 0.0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFormat(f"{state_name} cannot be read: {error!r}") from error
    good = isinstance(dtype, torch.dtype) and dtype in FLOAT_TYPES and block > 0 and nested >= 0
    require(good and min(shape, default=0) >= 0, state_name, f"cannot be read: {state}")
    require(kind in ("nf4", "fp4"), name, f"is of {kind!r}, which bitsandbytes does not have")
    codes = stored(files, name)
    form = FourBit(shape, dtype, block, nested, offset, codes.dtype, codes.shape)
    require(
        codes.nbytes == -(-form.numel // 2), name,
        f"has {codes.nbytes} bytes of codes for {form.numel} elements",
    )  # fmt: skip
    tensors = {each: f"{name}.{each}" for each in form.tensors if each != "codes"}
    return whole(files, name, form, {"codes": name, **tensors}, (state_name,))


def _int8(files: Files, prefix: str) -> QuantisedWeight:
    name = f"{prefix}.weight"
    codes = stored(files, name)
    layout = f"{prefix}.weight_format"
    require(len(codes.shape) == 2, name, f"has shape {codes.shape}, and int8 weights are matrices")
    if files.shape(layout) is not None:
        number = int(files.read(layout))
        require(number == 0, name, f"is laid out for one kind of GPU (weight_format {number})")
    form = Int8(codes.shape, _F32)
    tensors = {"codes": name, "SCB": f"{prefix}.SCB"}
    return whole(files, name, form, tensors, (layout,))
