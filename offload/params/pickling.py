"""Pickling of modules of a wrapped model.

The engine's hooks are closures and cannot be pickled, so a pickle of a module is an ordinary module
without them. For a process that is being spawned, such as a data-loader worker whose collator holds
the model, parameters are put on ``meta``. The worker does not compute with them, and the weights
need not fit in memory again for each worker.
"""

from __future__ import annotations

import copy
import copyreg
import io
from functools import partial
from multiprocessing import context
from typing import Any

import torch
from torch import nn

from ..private import module_private

KEY = "__reduce_ex__"  # on the instance, it precedes the class's


def spawning() -> bool:
    """Return whether pickling is for a process that ``multiprocessing`` is about to start."""
    return context.get_spawning_popen() is not None


def reduced(module: nn.Module, *leave_out: str) -> tuple[Any, ...]:
    """Return a module's ``__reduce_ex__`` value without the engine's hooks: an ordinary module.

    ``leave_out``: attributes that the copy does not have.
    """
    state = module_private.without_hooks(module)
    transient = getattr(type(module), "transient", ())  # see ``Sections``
    for name in (KEY, *transient, *leave_out):
        state.pop(name, None)
    if spawning():
        state |= module_private.with_buffers(module, _Copied)
    return copyreg.__newobj__, (type(module),), state  # type: ignore[attr-defined]


def copied(module: nn.Module, memo: dict[int, Any], *leave_out: str) -> nn.Module:
    """Return a deep copy of a module without the engine's hooks: an ordinary module."""
    made = type(module).__new__(type(module))
    memo[id(module)] = made
    _, _, state = reduced(module, *leave_out)
    made.__setstate__(copy.deepcopy(state, memo))
    return made


class _Copied:
    """A buffer that is pickled by its bytes.

    Otherwise torch would move the model's own buffer to shared memory, to send a file descriptor.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def __reduce__(self) -> tuple[Any, ...]:
        memory = io.BytesIO()
        torch.save(self._buffer.detach().cpu(), memory)
        return _loaded, (memory.getvalue(),)


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def on_meta(p: torch.Tensor) -> tuple[Any, ...]:
    """Return the ``__reduce_ex__`` value of a parameter that is sent to a spawned process."""
    return _parameter_on_meta, (tuple(p.shape), p.dtype, p.requires_grad)


def _parameter_on_meta(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


class Pickling:
    """The pickling support of the modules inside of a model, until ``remove``."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if module is not model]
        for module in self._modules:
            if KEY not in module.__dict__:
                module.__dict__[KEY] = partial(_reduce, module)

    def remove(self) -> None:
        """Restore the pickling of the modules' classes."""
        for module in self._modules:
            if _is_ours(module.__dict__.get(KEY)):
                del module.__dict__[KEY]


def _reduce(module: nn.Module, _protocol: object) -> tuple[Any, ...]:
    return reduced(module)


def _is_ours(value: object) -> bool:
    return isinstance(value, partial) and value.func is _reduce
