"""The GPU kernels: compiled at run time through CuPy, launched on torch's current stream.

Here, AdamW and Adam over flat buffers, with the arithmetic of the CPU kernels.  CI compiles them,
and tests their arithmetic on the host; tests/gpu compares both on a GPU.  Without CuPy, or for
other rules, plain torch updates device tensors (``reference.py``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from .formats import scale_name
from .kernels import FLOAT_TYPES, MOMENT_FORMATS, check_job

MOMENTS = ("exp_avg", "exp_avg_sq")
KERNELS = ("adam_fp32", "adam_bf16", "adam_int8")
THREADS = 256
ELEMENTS_PER_BLOCK = 8 * 256
MOST_BLOCKS = 16384


class AdamJob(ctypes.Structure):
    """``overspill::AdamJob`` of csrc/cuda/adam.cu."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("moment", ctypes.c_void_p * 2),
        ("scale", ctypes.c_void_p * 2),
        ("numel", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("coefficients", ctypes.c_float * 9),
        ("noise_key", ctypes.c_uint32),
        ("grad_type", ctypes.c_int),
        ("weight_type", ctypes.c_int),
        ("master_kind", ctypes.c_int),
    )


def adam_job(
    grad: Tensor,
    weight: Tensor,
    state: Mapping[str, Tensor],
    coefficients: Sequence[float],
    noise_key: int,
    position: int,
) -> AdamJob:
    """The kernel's argument.  The tensors must outlive the launch."""
    check_job(grad, weight, state, MOMENTS, position)
    job = AdamJob()
    job.grad, job.weight = grad.data_ptr(), weight.data_ptr()
    job.grad_type, job.weight_type = FLOAT_TYPES[grad.dtype], FLOAT_TYPES[weight.dtype]
    for kind, name in ((1, "master_lo"), (2, "master")):
        if name in state:
            job.master, job.master_kind = state[name].data_ptr(), kind
    for k, name in enumerate(MOMENTS):
        job.moment[k] = state[name].data_ptr()
        if state[name].dtype is torch.uint8:
            job.scale[k] = state[scale_name(name)].data_ptr()
    job.numel, job.position = weight.numel(), position
    job.coefficients[:] = coefficients
    job.noise_key = noise_key
    return job


@functools.cache
def _module(source: str) -> Any:
    """The kernels of a file, compiled when first used.

    Raises:
        ImportError: CuPy is not there.
    """
    cupy = importlib.import_module("cupy")
    folder = resources.files("overspill.cuda_sources")
    code = (folder / source).read_text(encoding="utf-8")
    numbers = (folder / "numbers.cuh").read_text(encoding="utf-8").replace("#pragma once", "")
    return cupy.RawModule(
        code=code.replace('#include "numbers.cuh"', numbers),
        options=("-std=c++17", "--fmad=false"),
    )


@functools.cache
def ready(source: str) -> bool:
    """Whether the kernels of a file can be had here; if not, says once why."""
    if os.environ.get("OVERSPILL_NATIVE") == "0":
        return False
    try:
        _module(source).compile()
    except Exception as error:  # CuPy's own errors have no common class below this one
        logging.getLogger("overspill").warning(
            "kernels of %s are not there, plain torch is several times slower: %s: %s",
            source, type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def serves(kernel: str, tensor: Tensor) -> bool:
    """Whether ``update`` can run a rule's kernel where this tensor is."""
    return tensor.device.type == "cuda" and kernel == "adam" and ready("adam.cu")


def launch(source: str, kernel: str, blocks: int, arguments: Sequence[Any], like: Tensor) -> None:
    """Gives the current stream of ``like``'s device a kernel with blocks of ``THREADS``."""
    cupy = importlib.import_module("cupy")
    with cupy.cuda.Device(like.device.index or 0):
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(like.device).cuda_stream)
        with stream:
            _module(source).get_function(kernel)((blocks,), (THREADS,), tuple(arguments))


def _verdict_flag(device: torch.device) -> Tensor:
    """A number that a kernel on ``device`` can write: in page-locked memory, or, where none can be
    had, on the device."""
    locked = device.type == "cuda"  # tests compile the kernels for the CPU
    try:
        return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=locked)
    except RuntimeError:
        return torch.zeros(1, dtype=torch.int32, device=device)


def _by_value(structure: ctypes.Structure) -> Any:
    """A kernel's argument as CuPy passes one by value: an array of one element of its bytes."""
    numpy = importlib.import_module("numpy")
    one = numpy.dtype((numpy.void, ctypes.sizeof(structure)))
    return numpy.frombuffer(bytearray(structure), dtype=one)


def _address(tensor: Tensor) -> Any:
    return importlib.import_module("numpy").uint64(tensor.data_ptr())


def update(
    kernel: str,
    grad: Tensor,
    weight: Tensor,
    state: Mapping[str, Tensor],
    moments: Sequence[str],
    coefficients: Sequence[float],
    noise_key: int,
    position: int,
) -> bool:
    """Do as ``kernels.update``, on a GPU, on torch's current stream; wait for its verdict.

    Raises:
        ValueError: the rule is not Adam's, or tensors do not fit.
    """
    if kernel != "adam" or tuple(moments) != MOMENTS:
        raise ValueError(f"there is no GPU kernel for {kernel!r}")
    job = adam_job(grad, weight, state, coefficients, noise_key, position)
    name = KERNELS[MOMENT_FORMATS[state[MOMENTS[0]].dtype]]
    blocks = min(MOST_BLOCKS, -(-weight.numel() // ELEMENTS_PER_BLOCK))
    if not blocks:
        return True
    # The kernel writes its verdict to the host itself. A copy of it, or of the job, would wait for
    # everything queued on the link before, such as records of state.
    on_gpu = weight.device.type == "cuda"
    flag = _verdict_flag(weight.device)
    launch("adam.cu", name, blocks, (_by_value(job), _address(flag)), weight)
    if on_gpu:
        done = torch.cuda.Event(blocking=True)  # waiting sleeps instead of spinning
        done.record(torch.cuda.current_stream(weight.device))
        done.synchronize()
    return int(flag) == 0
