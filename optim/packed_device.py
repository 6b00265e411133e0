"""``packed.unpack`` on a GPU: csrc/cuda/unpack.cu, compiled at run time through CuPy.

CI compiles it and tests its arithmetic on the host; tests/gpu compares it on a GPU.  Without CuPy
plain torch unpacks, in more passes.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from . import cuda_kernels
from .kernels import FLOAT_TYPES
from .packed_layout import Parts

EACH = 8  # elements of a thread


def serves(tensor: Tensor) -> bool:
    """Whether ``unpack`` can run where this tensor is."""
    return tensor.device.type == "cuda" and cuda_kernels.ready("unpack.cu")


def arguments(
    parts: Parts, page: int, weight: Tensor, nf4: int, scales: int
) -> tuple[str, tuple[Any, ...]]:
    """The kernel and its arguments; memory by address."""
    kind, to = FLOAT_TYPES[weight.dtype], weight.data_ptr()
    if parts.form == "int8":
        return "unpack_int8", (page, page + parts.scales, parts.columns, parts.numel, to, kind)
    return "unpack_nf4", (
        page, page + parts.scale_codes, page + parts.scales, page + parts.offset, nf4, scales,
        parts.numel, to, kind,
    )  # fmt: skip


def unpack(parts: Parts, page: Tensor, weight: Tensor, nf4: Tensor, scales: Tensor) -> None:
    """Do as ``packed.unpack``, on torch's current stream.

    ``nf4`` and ``scales`` are the values that codes stand for, on the device.
    """
    name, given = arguments(parts, page.data_ptr(), weight, nf4.data_ptr(), scales.data_ptr())
    numpy = importlib.import_module("numpy")
    *words, kind = given
    blocks = -(-parts.numel // (cuda_kernels.THREADS * EACH))
    typed = (*map(numpy.uint64, words), numpy.int32(kind))
    cuda_kernels.launch("unpack.cu", name, blocks, typed, weight)
