"""NVIDIA's ModelOpt: FP8 with scales, and NVFP4, whose scales have a common factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import scaled
from .format_base import Files, QuantisedWeight, require, stored, whole
from .fp4 import Fp4

METHODS = ("modelopt",)


def find(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    """Yield the weights of this format.

    Raises:
        UnreadableFormat: one of them is incomplete, or inputs of layers are scaled as well.
    """
    for name in files.names:
        scales_inputs = name.endswith(".pre_quant_scale")
        require(not scales_inputs, name, "scales the inputs of a layer, which cannot be read")
        kinds = set(files.dtypes(name))
        if not name.endswith(".weight"):
            continue
        if kinds & scaled.KINDS.keys():
            yield scaled.weight(files, name, f"{name}_scale")
        elif torch.uint8 in kinds:
            yield _nvfp4(files, name)


def _nvfp4(files: Files, name: str) -> QuantisedWeight:
    tensors = {"codes": name, "scales": f"{name}_scale", "upper": f"{name}_scale_2"}
    codes, scales = stored(files, tensors["codes"]), stored(files, tensors["scales"])
    require(math.prod(files.shape(tensors["upper"]) or ()) == 1, name, "has no weight_scale_2")
    form = Fp4.of(name, codes, scales, upper="multiplies")
    return whole(files, name, form, tensors)
