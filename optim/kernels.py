"""The door to the native kernels: checks tensors, and passes addresses and lengths.

Without the extension, or with ``OVERSPILL_NATIVE=0``, plain torch does the same arithmetic
(``reference.py``), bit for bit and several times slower.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from .cores import default_threads
from .formats import BLOCK, GRANULES, MOMENT_DTYPES, scale_name, split_master

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOMENT_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
COEFFICIENTS = 9
MOST_MOMENTS = 3


def _load_native() -> ModuleType | None:
    wish = os.environ.get("OVERSPILL_NATIVE", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"OVERSPILL_NATIVE must be 0 or 1, not {wish!r}")
    if wish == "0":
        return None
    try:
        native = importlib.import_module("._native", __package__)
    except ImportError as error:
        if wish == "1":
            raise
        logging.getLogger("overspill").warning(
            "optimizer updates run in plain torch, several times slower: %s", error
        )
        return None
    isa = os.environ.get("OVERSPILL_ISA", "")
    if isa:
        try:
            native.set_isa(isa)
        except ValueError as error:
            raise ValueError(f"OVERSPILL_ISA: {error}; unset it to use the best") from None
    native.set_threads(default_threads())
    return native


LEFT_TO_DEVICE = 2  # training's own thread or autograd's, and the pump
NATIVE = _load_native()
# The kernels of csrc/cpu/rules.h, by name.
RULES = {name: n for n, name in enumerate(NATIVE.rules())} if NATIVE is not None else {}


def native_isa() -> str:
    """The instruction set that CPU updates use: ``avx512``, ``avx2``, ``neon``, ``scalar``; or
    ``torch`` when the extension is not there."""
    return NATIVE.isa() if NATIVE is not None else "torch"


def set_threads(count: int) -> None:
    """Sets how many threads run an update, the caller included.  Results do not depend on it.

    Raises:
        ValueError: ``count`` is not in 1..256.
    """
    if NATIVE is not None:
        NATIVE.set_threads(count)
    elif not 1 <= count <= 256:
        raise ValueError(f"threads must be 1 to 256, not {count}")


def threads() -> int:
    """How many threads run an update."""
    return NATIVE.threads() if NATIVE is not None else torch.get_num_threads()


def threads_beside(device: torch.device) -> int:
    """Return the number of threads for updates while ``device`` computes.

    That is the number that was set, if one was.  Otherwise, with a GPU, a few less than the default
    are used, for the threads that launch its work.
    """
    count = threads()
    if device.type == "cpu" or count != default_threads():
        return count
    return count - min(LEFT_TO_DEVICE, count // 4)


def serves(kernel: str, tensor: Tensor) -> bool:
    """Whether ``update`` can run a rule's kernel where this tensor is."""
    return kernel in RULES and tensor.device.type == "cpu"


def check_flat(name: str, tensor: Tensor, numel: int) -> None:
    """Raises ValueError unless ``tensor`` is one contiguous row of ``numel`` elements."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat and contiguous, but has shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, but has {tensor.numel()}")


def check_job(
    grad: Tensor,
    weight: Tensor,
    state: Mapping[str, Tensor],
    moments: Sequence[str],
    position: int,
) -> None:
    """Raises ValueError or KeyError unless the tensors fit one another (see ``Rule.update``)."""
    numel = weight.numel()
    dtypes = {"gradient": grad.dtype, "weight": weight.dtype}
    for what, dtype in dtypes.items():
        if dtype not in FLOAT_TYPES:
            raise ValueError(f"a {what} of {dtype} has no kernel; use one of {list(FLOAT_TYPES)}")
    check_flat("weight", weight, numel)
    check_flat("gradient", grad, numel)
    if "master_lo" in state:
        check_flat("master_lo", state["master_lo"], numel)
        if weight.dtype is not torch.bfloat16 or state["master_lo"].dtype is not torch.int16:
            raise ValueError("a split master needs bfloat16 weights and an int16 master_lo")
    elif "master" in state:
        check_flat("master", state["master"], numel)
        if weight.dtype is torch.float32 or state["master"].dtype is not torch.float32:
            raise ValueError("a whole master is float32, beside bfloat16 or float16 weights")
    for name in moments:
        moment = state[name]
        check_flat(name, moment, numel)
        if moment.dtype not in MOMENT_FORMATS or moment.dtype is not state[moments[0]].dtype:
            raise ValueError(
                f"moments share one dtype, one of {MOMENT_DTYPES}; {name} is {moment.dtype}"
            )
        if position % GRANULES[moment.dtype]:
            raise ValueError(
                f"a buffer with moments of {moment.dtype} starts at a multiple of "
                f"{GRANULES[moment.dtype]}, not {position}"
            )
        if moment.dtype is torch.uint8:
            scale = state[scale_name(name)]
            check_flat(scale_name(name), scale, -(-numel // BLOCK))
            if scale.dtype is not torch.float32:
                raise ValueError(f"{scale_name(name)} must be float32, not {scale.dtype}")


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
    """One native pass (see ``Rule.update``).  Releases the GIL."""
    check_job(grad, weight, state, moments, position)
    if NATIVE is None:
        raise RuntimeError("the native kernels are not there; use reference.update")
    master = state.get("master_lo", state.get("master"))
    master_kind = 0 if master is None else 1 if "master_lo" in state else 2
    addresses = [0] * MOST_MOMENTS
    scales = [0] * MOST_MOMENTS
    moment_format = 0
    for k, name in enumerate(moments):
        addresses[k] = state[name].data_ptr()
        moment_format = MOMENT_FORMATS[state[name].dtype]
        if moment_format == 2:
            scales[k] = state[scale_name(name)].data_ptr()
    result: bool = NATIVE.update(
        RULES[kernel],
        moment_format,
        weight.numel(),
        position,
        noise_key,
        grad.data_ptr(),
        FLOAT_TYPES[grad.dtype],
        weight.data_ptr(),
        FLOAT_TYPES[weight.dtype],
        0 if master is None else master.data_ptr(),
        master_kind,
        addresses,
        scales,
        [*coefficients, *([0.0] * (COEFFICIENTS - len(coefficients)))],
    )
    return result


def write_split_master(value: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Write the two halves of ``split_master`` to flat tensors, in one pass if it is on the CPU.

    Args:
        value: fp32, on the CPU.
        upper: bf16, on any device.
        lower: int16, on the CPU.
    """
    for name, tensor in (("value", value), ("upper", upper), ("lower", lower)):
        check_flat(name, tensor, value.numel())
    if NATIVE is None or upper.device.type != "cpu":
        high, low = split_master(value)
        upper.copy_(high)
        lower.copy_(low)
    else:
        pointers = value.data_ptr(), upper.data_ptr(), lower.data_ptr()
        NATIVE.split_master(*pointers, value.numel())
