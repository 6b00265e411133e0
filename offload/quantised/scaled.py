"""Weights of 8 bits with scales: fp8 and int8, per tensor, row, block or group.

DeepSeek (128 x 128 blocks), fbgemm, ModelOpt and ComfyUI write FP8 like this.  compressed-tensors
calls it float-quantized, int-quantized, naive-quantized and mxfp8-quantized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from ..optim.quantised import Codes, Scaling, dequantise, table_of
from .cast import Cast
from .format_base import (
    Files,
    Format,
    QuantisedWeight,
    StoredTensor,
    as_fp32,
    require,
    stored,
    whole,
)

METHODS = ("fp8", "fbgemm_fp8")
KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "signed"}
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class Scaled(Format):
    """A weight of 8-bit codes.

    Attributes:
        codes: dtype of the codes.
        scales: dtype of the scales; uint8 and e8m0 are powers of two.
        grid: rows and columns of the scales.
        block: rows and columns of the weight that share a scale.
        zeros: dtype of zero points, or ``None``.
    """

    kind: ClassVar[str] = "scaled"
    codes: torch.dtype
    scales: torch.dtype
    grid: tuple[int, int]
    block: tuple[int, int]
    zeros: torch.dtype | None = None

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """See ``Format``."""
        found = {
            "codes": StoredTensor(self.codes, self.shape),
            "scales": StoredTensor(self.scales, self.grid),
        }
        return {**found, "zeros": StoredTensor(self.zeros, self.grid)} if self.zeros else found

    def dequantise(self, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """See ``Format``."""
        data, zeros = tensors["codes"].reshape(-1).view(torch.uint8), tensors.get("zeros")
        columns = self.shape[-1]
        codes = Codes("rows", 8, math.prod(self.shape[:-1]), columns, columns)
        dequantise(
            codes, data, table_of(KINDS[self.codes], 8, data.device), as_fp32(tensors["scales"]),
            Scaling(self.block, through=self.dtype), weight,
            zeros=None if zeros is None else zeros.float(),
        )  # fmt: skip


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: scales of one of them do not fit.
    """
    given = config.get("weight_block_size")
    for name in _codes_in(files):
        scales = next((n for n in _scale_names(name) if files.shape(n) is not None), None)
        if scales is not None:  # else it is refused: see ``formats``
            yield weight(files, name, scales, block=None if given is None else tuple(given))


def find_casts(files: Files) -> Iterator[QuantisedWeight]:
    """Yield fp8 weights of files without any scale, which are values as they are.

    Raises:
        UnreadableFormat: beside one of them is a tensor that may be its scale.
    """
    names = files.names
    for name in _codes_in(files):
        parent = name.rpartition(".")[0]
        near = [n for n in names if n.rpartition(".")[0] == parent and "scale" in n]
        require(not near, name, f"is fp8, and {near[:1]} beside it is no scale that is known")
        form = Cast(files.shape(name) or (), next(iter(files.dtypes(name))))
        yield whole(files, name, form, {"values": name})._replace(dtype=torch.float32)


def has_scales(files: Files) -> bool:
    """Return whether any tensor is the scale of an fp8 tensor."""
    return any(
        files.shape(scale) is not None for name in _codes_in(files) for scale in _scale_names(name)
    )


def _codes_in(files: Files) -> Iterator[str]:
    """Yield the names of fp8 tensors, without ComfyUI's marker."""
    for name in files.names:
        if set(files.dtypes(name)) & FP8 and not name.endswith("scaled_fp8"):
            yield name


def _scale_names(name: str) -> list[str]:
    before = name.removesuffix("weight")
    return [*(f"{name}{end}" for end in SCALES), f"{before}scale_weight", f"{before}scale"]


def weight(
    files: Files, name: str, scale_name: str, *, zero_name: str | None = None,
    block: tuple[int, ...] | None = None, dtype: torch.dtype | None = torch.float32,
) -> QuantisedWeight:  # fmt: skip
    """Return a weight of 8-bit codes.

    Args:
        name: of the weight, and of its codes.
        block: rows and columns that share a scale; by default the scales tell.
        dtype: in which its library computes; ``None``: that of the scales.

    Raises:
        UnreadableFormat: its tensors do not fit together.
    """
    codes, scales = stored(files, name), stored(files, scale_name)
    grid = _grid(codes.shape, scales.shape, block)
    require(grid, name, f"of {codes.shape} has scales of {scales.shape}, which do not fit")
    assert grid is not None
    zeros = None if zero_name is None else stored(files, zero_name).dtype
    form = Scaled(
        codes.shape, dtype or scales.dtype, codes.dtype, scales.dtype, grid.scales, grid.block,
        zeros,
    )  # fmt: skip
    tensors = {"codes": name, "scales": scale_name}
    if zero_name is not None:
        tensors["zeros"] = zero_name
    return whole(files, name, form, tensors)


class _Grid(NamedTuple):
    """Rows and columns of scales, and of the weight's elements that share one."""

    scales: tuple[int, int]
    block: tuple[int, int]


def _grid(
    codes: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...] | None
) -> _Grid | None:
    """Return how scales lie over codes, whose leading dimensions are rows; ``None``: unclear.

    Stacks of experts have scales for each expert, and no block has elements of two experts.
    """
    if not codes or not math.prod(codes):
        return None
    rows, columns = math.prod(codes[:-1]), codes[-1]
    if math.prod(scales) == 1:
        return _Grid((1, 1), (rows, columns))
    if len(scales) == 4 and scales[1] == scales[3] == 1:  # of ModelOpt
        scales = scales[::2]
    if scales in ((rows,), codes[:-1]):
        return _Grid((rows, 1), (1, columns))
    if len(scales) != len(codes) or scales[:-2] != codes[:-2]:
        return None
    high, wide = codes[-2], columns
    if block is None:
        block = high // max(1, scales[-2]), wide // max(1, scales[-1])
        sizes = zip(block, (high, wide), strict=True)
        # A block of another size could be cut at the border.
        if not all(size in (1, most) or _is_power_of_two(size) for size, most in sizes):
            return None
        if (block[0] * scales[-2], block[1] * scales[-1]) != (high, wide):
            return None
    if min(block) < 1 or tuple(scales[-2:]) != (-(-high // block[0]), -(-wide // block[1])):
        return None
    if len(codes) > 2 and high % block[0]:
        return None
    return _Grid((math.prod(scales[:-1]), scales[-1]), (block[0], block[1]))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
