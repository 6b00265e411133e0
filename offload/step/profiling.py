"""Profiles of a micro-step of a model in memory: compute time and activations by unit."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..planning.costs import REST, Profile
from ..planning.partition import Partition
from ..private import torch_private
from .hooks import differentiable

REPEAT_S, MOST_RUNS = 2.0, 5


class _Clock:
    """A clock that attributes elapsed time to the innermost open unit, or to the rest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = [REST]
        self._since_s = self._now_s()

    def _now_s(self) -> float:
        if self._device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _turn(self) -> None:
        now_s = self._now_s()
        self.seconds[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    @property
    def running(self) -> str:
        return self._open[-1]

    def enter(self, name: str) -> None:
        self._turn()
        self._open.append(name)

    def leave(self) -> None:
        self._turn()
        self._open.pop()

    def go_on_with(self, name: str) -> None:
        """End the current unit and begin another one, for backward, where units do not nest."""
        self._turn()
        self._open[-1] = name

    def take(self) -> dict[str, float]:
        """Return the seconds so far, and start again."""
        self._turn()
        taken = dict(self.seconds)
        self.seconds.clear()
        self._open = [REST]
        return taken


class _Watch:
    """The hooks of one micro-step."""

    def __init__(self, parts: Partition, device: torch.device) -> None:
        self.clock = _Clock(device)
        self.kept: Counter[str] = Counter()
        self._seen: dict[int, torch.Tensor] = {}  # by storage; held, so that none is counted twice
        self._weights = {torch_private.storage_key(p) for p in parts.parameters}
        self._handles: list[Any] = []
        for unit, found in zip(parts.units, parts.found, strict=True):
            if unit.runs:
                self._hook(unit.name, found.module)

    def _hook(self, name: str, module: torch.nn.Module) -> None:
        def before(_module: torch.nn.Module, _args: Any) -> None:
            self.clock.enter(name)

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self.clock.leave()
            for t in differentiable(output):
                t.register_hook(lambda _grad: self.clock.go_on_with(name))

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after))

    def keep(self, t: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves, once per storage and without weights."""
        key = torch_private.storage_key(t)
        if key not in self._weights and key not in self._seen:
            self._seen[key] = t.detach()
            self.kept[self.clock.running] += t.untyped_storage().nbytes()
        return t

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def profile_step(
    model: torch.nn.Module, parts: Partition, example: Callable[[], torch.Tensor]
) -> Profile:
    """Run ``example`` and its backward, and profile compute time and activations by unit.

    The first run warms up. Measured runs follow, up to ``MOST_RUNS`` and for about ``REPEAT_S``
    seconds in all. The fastest one counts, because other load on the machine only adds time. On
    ``meta`` there is a single run, which measures activations only.

    Gradients that the parameters have are restored.
    """
    device = next((p.device for p in parts.parameters), torch.device("cpu"))
    kept_grads = [p.grad for p in parts.parameters]
    try:
        if device.type == "meta":
            return replace(_run(parts, example, device), forward_s={}, backward_s={})
        _run(parts, example, device)
        until_s = time.perf_counter() + REPEAT_S
        best = _run(parts, example, device)
        for _ in range(MOST_RUNS - 1):
            if time.perf_counter() > until_s:
                break
            best = min(best, _run(parts, example, device), key=lambda each: each.compute_s)
        return best
    finally:
        for p, grad in zip(parts.parameters, kept_grads, strict=True):
            p.grad = grad


def _run(parts: Partition, example: Callable[[], torch.Tensor], device: torch.device) -> Profile:
    for p in parts.parameters:
        p.grad = None
    watch = _Watch(parts, device)
    try:
        watch.clock.take()
        with torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda t: t):
            loss = example()
        forward_s = watch.clock.take()
        loss.backward()
        return Profile(forward_s, watch.clock.take(), dict(watch.kept))
    finally:
        watch.remove()
