"""Units whose forward is computed again in backward, so that autograd keeps their inputs alone.

The checkpoint is torch's own, of the kind that is not reentrant, put around a unit by hooks.  What
changes itself when it runs would change twice: such units are kept, and to know them, the first
forward of each is only watched.  Nothing is decided anew within a step: what a checkpoint of the
user's own computes again must be as it was.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
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
_VALUES = (bool, int, float, complex, str, bytes)
_GROWN = 1.1  # inputs so much larger are another load
_CHANCES = 3  # forwards that may change their module, as the first does that fills a cache


class Around(Protocol):
    """What has begun with a unit's forward and ends with it."""

    def end(self, *, completed: bool) -> None:
        """The forward has ended; not ``completed``: it raised."""


class _Again(threading.local):
    """The units whose forward the present thread computes again."""

    def __init__(self) -> None:
        self.units: list[int] = []


class Recompute:
    """Begins a checkpoint where one of ``units`` runs.

    ``able``: the units that may; ``watching``: all of these are looked at.
    ``input_bytes``: by unit, what went into its largest forward while watched.
    ``grown``: how much more has come since.
    ``keeps_below``: the share of those inputs up to which nothing needs to be computed again.
    """

    def __init__(
        self, parts: Partition, units: frozenset[int], device: torch.device, *, watching: bool
    ) -> None:
        self.units, self.watching = units, watching
        self.able = parts.recomputable if units or watching else frozenset()
        self.input_bytes = [0] * len(parts.units)
        self.grown, self.keeps_below = 1.0, 0.0
        self._found, self._device = parts.found, device
        self._again = _Again()
        # Units that do not change when they run, by the mode that they train or are tried in.
        self._steady: set[tuple[int, bool]] = set()
        self._proven: set[tuple[int, bool]] = set()  # from the next step on they are steady
        self._changes = Counter[int]()

    def begin(
        self, unit: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Around | None:
        """What is around a forward that is about to run."""
        wanted = unit in self.units
        if not (self.watching or wanted) or unit not in self.able:
            return None
        if not torch.is_grad_enabled() or unit in self._again.units:
            return None
        leaves, structure = torch_private.tree_flatten((tuple(args), dict(kwargs)))
        small = self._measure(unit, leaves)
        if (unit, module.training) not in self._steady:
            return _Watched(self, unit, module)
        if small or not wanted:
            return None
        others = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
        if others:
            self._keep(
                unit, f"is called with an object of class {type(others[0]).__name__} that it may "
                "change (a cache? pass use_cache=False)",
            )  # fmt: skip
            return None
        if not any(
            isinstance(leaf, torch.Tensor) and leaf.device == self._device for leaf in leaves
        ):
            return None  # torch knows by these whose random numbers to bring back
        return _Checkpointed(self, unit, module, leaves, structure)

    def _keep(self, unit: int, why: str) -> None:
        """From now on the unit is not computed again."""
        if unit in self.units:
            log.warning(
                "overspill: unit %s %s: it cannot be computed again, and what autograd saves of it "
                "is kept", self._found[unit].name, why,
            )  # fmt: skip
        self.units, self.able = self.units - {unit}, self.able - {unit}

    def watched(self, unit: int, changed: str | None, *, training: bool) -> None:
        """The unit has run, and ``changed`` this of itself."""
        if changed is None:
            self._proven.add((unit, training))
            return
        self._changes[unit] += 1
        if self._changes[unit] >= _CHANCES:
            self._keep(unit, f"changes {changed} when it runs")

    def surprised(self, unit: int, changed: str) -> None:
        """The unit, which will be computed again, has ``changed`` this, as it did not before."""
        log.warning(
            "overspill: unit %s has changed %s when it ran, as it did not before; backward "
            "computes it once more, and may change that again; pass activations='host' if it must "
            "not",
            self._found[unit].name, changed,
        )  # fmt: skip
        self._proven = {each for each in self._proven if each[0] != unit}

    def stepped(self) -> None:
        """A step has ended: what was found holds from now on."""
        self._steady = set(self._proven)

    def _measure(self, unit: int, leaves: Sequence[Any]) -> bool:
        """Notes how much goes into the unit.  Whether it is so little that all may be kept."""
        known = self.input_bytes[unit]
        nbytes = sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad)
        if self.watching:
            self.input_bytes[unit] = max(known, nbytes)
        elif known and nbytes > known * _GROWN:
            self.grown = max(self.grown, nbytes / known)
        return 0 < nbytes <= known * self.keeps_below

    def watch(self) -> None:
        """From now on all are looked at, for another load."""
        self.watching, self.input_bytes = True, [0] * len(self.input_bytes)

    def grow(self) -> None:
        """What has come since is the load from now on."""
        self.input_bytes = [int(nbytes * self.grown) for nbytes in self.input_bytes]
        self.grown = 1.0

    def compute(self, unit: int, function: partial[Any]) -> None:
        """Computes a forward again."""
        self._again.units.append(unit)
        try:
            function()
        finally:
            self._again.units.remove(unit)


class _Checkpointed:
    """A checkpoint around a forward."""

    def __init__(
        self, recompute: Recompute, unit: int, module: nn.Module, leaves: list[Any], structure: Any
    ) -> None:
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        inputs = [leaves[i] for i in tensors]
        for i in tensors:
            leaves[i] = None  # autograd has them, and may let them leave

        def again(*inputs: torch.Tensor) -> None:
            given = list(leaves)
            for i, tensor in zip(tensors, inputs, strict=True):
                given[i] = tensor
            args, kwargs = torch_private.tree_unflatten(given, structure)
            recompute.compute(unit, partial(module, *args, **kwargs))

        self._recompute, self._unit, self._module = recompute, unit, module
        self._before = _state_of(module)
        self._checkpoint: Checkpoint = torch_private.checkpoint(again, inputs)
        next(self._checkpoint)

    def end(self, *, completed: bool) -> None:
        if not completed:
            self._checkpoint.close()
            return
        next(self._checkpoint, None)
        if (changed := _changed(self._module, self._before)) is not None:
            self._recompute.surprised(self._unit, changed)


class _Watched:
    """A forward that is kept, to see whether it changes its module."""

    def __init__(self, recompute: Recompute, unit: int, module: nn.Module) -> None:
        self._recompute, self._unit, self._module = recompute, unit, module
        self._before, self._training = _state_of(module), module.training

    def end(self, *, completed: bool) -> None:
        if completed:
            changed = _changed(self._module, self._before)
            self._recompute.watched(self._unit, changed, training=self._training)


# By name: a buffer or an attribute, held so that no other takes its place, and what tells whether
# it is as it was.
_State = dict[str, tuple[object, object]]


def _state_of(module: nn.Module) -> _State:
    """All that a forward might change, but for its parameters, which autograd watches."""
    found: _State = {}
    for name, buffer in module.named_buffers():
        found[name] = buffer, torch_private.version_of(buffer)
    for prefix, each in module.named_modules():
        for name, value in torch_private.own_attributes(each):
            found[f"{prefix}.{name}" if prefix else name] = value, _inside(value)
    # Checkpoints bring back torch's own random numbers, and no others.
    found["Python's random numbers"] = None, random.getstate()
    found["NumPy's random numbers"] = None, np.random.get_state(legacy=False)["state"]["pos"]
    return found


def _inside(value: object) -> object:
    """What tells that an object has changed that is the same as before."""
    if isinstance(value, (list, dict, set)):
        return len(value)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    return None


def _changed(module: nn.Module, before: _State) -> str | None:
    """The first thing that is not as it was."""
    now = _state_of(module)
    for name in {**before, **now}:
        was, found = before.get(name), now.get(name)
        if was is None or found is None or not _same(was, found):
            return name
    return None


def _same(was: tuple[object, object], found: tuple[object, object]) -> bool:
    if was[0] is found[0]:
        return was[1] == found[1]
    return type(was[0]) is type(found[0]) and isinstance(was[0], _VALUES) and was[0] == found[0]
