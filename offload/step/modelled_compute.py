"""Compute time of a simulated device: each unit takes the time that its FLOPs need.

The tiny model's own arithmetic runs at once on the calling thread. The thread then sleeps for the
rest of the modelled time, after the unit's weights have come and before its results are passed on.
So everything that the engine does meanwhile overlaps with compute, as on a device.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ..movement.accelerators.pace import sleep_until
from ..movement.compute_use import ComputeUse
from ..planning.partition import Partition
from ..private import compile_private, torch_private
from .hooks import differentiable


class ModelledCompute:
    """Hooks on every unit, installed after the engine's own.

    Args:
        flops_s: FLOPs per second of the device.
        compute: counts the time spent waiting for the engine, which is not modelled compute time.
    """

    def __init__(
        self, model: nn.Module, parts: Partition, flops_s: float, compute: ComputeUse
    ) -> None:
        self._flops_s, self._compute = flops_s, compute
        self._due_ns = self._waited_at = 0
        self.modelled_s = 0.0  # total modelled compute
        self._handles: list[Any] = [model.register_forward_pre_hook(self._restart, prepend=True)]
        for unit, found in zip(parts.units, parts.found, strict=True):
            if unit.flops:
                self._hook(found.module, unit.flops, unit.backward_flops)

    def _hook(self, module: nn.Module, flops: int, backward_flops: int) -> None:
        tokens = [0]

        @compile_private.not_compiled
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens[0] = token_count((*args, *kwargs.values()))
            self._spend(flops * tokens[0])

        @compile_private.not_compiled
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            need, once = backward_flops * tokens[0], [False]

            def backward(_grad: torch.Tensor) -> None:
                if not once[0]:
                    once[0] = True
                    self._spend(need)

            for t in differentiable(output):
                t.register_hook(backward)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def _restart(self, _module: nn.Module, _args: Any) -> None:
        self._due_ns, self._waited_at = time.perf_counter_ns(), self._compute.waited_ns

    def _spend(self, flops: float) -> None:
        """Sleep until compute of ``flops`` is due to end.

        It begins when the previous compute was due to end, plus the waits since. So neither the
        model's own arithmetic nor a late wake-up adds to the modelled time.
        """
        needed_s = flops / self._flops_s
        self.modelled_s += needed_s
        needed_ns, now_ns = int(needed_s * 1e9), time.perf_counter_ns()
        waited_ns = self._compute.waited_ns
        begin_ns = self._due_ns + waited_ns - self._waited_at
        self._due_ns = max(begin_ns, now_ns - needed_ns) + needed_ns
        self._waited_at = waited_ns
        sleep_until(self._due_ns)

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


def token_count(values: Any) -> int:
    """Return the number of tokens in the first non-empty tensor among a module's arguments.

    These are all elements of token ids, or all but the last dimension of activations.
    """
    for value in torch_private.tree_leaves(values):
        if not isinstance(value, torch.Tensor) or value.is_nested:
            continue
        if value.dim() and value.numel():
            return value.numel() // value.shape[-1] if value.is_floating_point() else value.numel()
    return 0
