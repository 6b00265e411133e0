"""Units whose forward is computed again in backward, so that autograd keeps their inputs alone.

The checkpoint is torch's own, of the kind that is not reentrant, put around a unit by hooks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..planning.partition import Partition
from . import torch_private

log = logging.getLogger("overspill")

Checkpoint = Generator[None, None, None]
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, nn.Module,
)  # fmt: skip


class _Again(threading.local):
    """The units whose forward the present thread computes again."""

    def __init__(self) -> None:
        self.units: list[int] = []


class Recompute:
    """Begins a checkpoint where one of ``units`` runs: with ``wished``, every one that can."""

    def __init__(self, wished: bool, parts: Partition) -> None:
        self.units = [wished and parts.recomputable(unit.index) for unit in parts.units]
        self._again = _Again()

    def begin(
        self, unit: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Checkpoint | None:
        """The checkpoint around a forward that is about to run, to be ended by ``end``; ``None``:
        there is none."""
        if not self.units[unit] or not torch.is_grad_enabled() or unit in self._again.units:
            return None
        leaves, structure = torch_private.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
        if others:
            self.units[unit] = False
            log.warning(
                "overspill: activations='recompute' cannot compute %s again, which is called with "
                "an object of class %s that it may change (a cache? pass use_cache=False): what it "
                "saves is kept", type(module).__name__, type(others[0]).__name__,
            )  # fmt: skip
            return None
        inputs = [leaves[i] for i in tensors]
        for i in tensors:
            leaves[i] = None  # autograd has them, and may let them leave
        again = partial(self._run, unit, module, leaves, tensors, structure)
        checkpoint = torch_private.checkpoint(again, inputs)
        next(checkpoint)
        return checkpoint

    def _run(
        self, unit: int, module: nn.Module, leaves: Sequence[Any], tensors: Sequence[int],
        structure: Any, *inputs: torch.Tensor,
    ) -> None:  # fmt: skip
        given = list(leaves)
        for i, tensor in zip(tensors, inputs, strict=True):
            given[i] = tensor
        args, kwargs = torch_private.tree_unflatten(given, structure)
        self._again.units.append(unit)
        try:
            module(*args, **kwargs)
        finally:
            self._again.units.remove(unit)


def end(checkpoint: Checkpoint | None, *, completed: bool) -> None:
    """The forward has ended; not ``completed``: it raised."""
    if checkpoint is None:
        return
    if completed:
        next(checkpoint, None)
    else:
        checkpoint.close()
