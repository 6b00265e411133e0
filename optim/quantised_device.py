"""``quantised.dequantise`` on a GPU: csrc/cuda/dequantise.cu, compiled at run time through CuPy.

CI compiles it and tests its arithmetic on the host; tests/gpu compares it on a GPU.  Without CuPy
plain torch dequantises, in more passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from torch import Tensor

from . import cuda_kernels

EACH = 8  # columns of a thread
TILE_ROWS, TILE_COLUMNS = 64, 32  # of a thread block, where rows are not taken one by one
BY_ROWS = 1  # the last order of codes that lie row by row


def serves(tensor: Tensor) -> bool:
    """Return whether ``dequantise`` can run on the device of this tensor."""
    return tensor.device.type == "cuda" and cuda_kernels.ready("dequantise.cu")


def blocks(job: Mapping[str, int | float]) -> int:
    """Return the number of thread blocks that cover the matrix."""
    rows, columns = int(job["rows"]), int(job["columns"])
    if job["order"] <= BY_ROWS and not job["transposed"]:
        return -(-rows * -(-columns // EACH) // cuda_kernels.THREADS)
    return -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)


def dequantise(job: Mapping[str, int | float], weight: Tensor) -> None:
    """Launch the kernel on torch's current stream.

    Args:
        job: the kernel's arguments in their order; memory by address.
        weight: a tensor of the device.
    """
    numpy = importlib.import_module("numpy")
    arguments = [
        numpy.float32(value) if name == "factor" else numpy.uint64(value)
        for name, value in job.items()
    ]
    cuda_kernels.launch("dequantise.cu", "dequantise", blocks(job), arguments, weight)
