"""Units whose forward is computed again in backward, so that autograd keeps their inputs alone.

The checkpoint is torch's own, of the kind that is not reentrant, put around a unit by hooks.  What
changes itself when it runs would change twice: such units are kept, and to know them, the first
forward of each is only watched, unless its code is known.  Nothing is decided anew within a step:
what a checkpoint of the user's own computes again must be as it was.
"""

from __future__ import annotations

import logging
import pickle
import random
import threading
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ..errors import OffloadError
from ..planning.partition import Partition
from . import module_private, torch_private
from .known_code import known

log = logging.getLogger("overspill")

Checkpoint = Generator[None, None, None]
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_NAMES = (bool, int, str, type(None))
_DEEP, _LONG = 3, 256  # how far what a module has is looked into, and how many members of it
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
    ``computed``: how often each unit was computed again, until someone clears it.
    ``keeps_below``: the share of those inputs up to which nothing needs to be computed again.
    """

    def __init__(
        self, parts: Partition, units: frozenset[int], device: torch.device, *, watching: bool
    ) -> None:
        """``watching``: units are yet to be chosen, of those that are ``known``."""
        self.units, self.watching = units, watching
        self.able = parts.recomputable if units or watching else frozenset()
        self.input_bytes = [0] * len(parts.units)
        self.grown, self.keeps_below = 1.0, 0.0
        self.computed = Counter[int]()
        self._found, self._device = parts.found, device
        self._again = _Again()
        # Units that do not change when they run, by the mode that they train or are tried in.
        self._steady: set[tuple[int, bool]] = set()
        self._proven: set[tuple[int, bool]] = set()  # from the next step on they are steady
        self._read = set[tuple[int, bool]]()  # whose code has been looked at
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
        if (unit, module.training) not in self._steady and not (
            wanted and self._shows(unit, module)
        ):
            return _Watched(self, unit, module, leaves)
        if small or not wanted:
            return None
        if (why := _obstacle(leaves)) is not None:
            self._keep(unit, why)
            return None
        if not any(
            isinstance(leaf, torch.Tensor) and leaf.device == self._device for leaf in leaves
        ):
            return None  # torch knows by these whose random numbers to bring back
        return _Checkpointed(self, unit, module, leaves, structure)

    def _shows(self, unit: int, module: nn.Module) -> bool:
        """Whether its code, looked at once, tells that the unit does not change when it runs."""
        case = unit, module.training
        if case in self._read:
            return False
        self._read.add(case)
        shows = known(module)
        if shows:
            self._steady.add(case)
            self._proven.add(case)
        return shows

    def known(self, units: frozenset[int]) -> frozenset[int]:
        """Those of the units of which it is known that they compute the same again."""
        return frozenset(unit for unit in units & self.able if known(self._found[unit].module))

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

    def surprised(self, unit: int, changed: str, again: str) -> None:
        """The unit, which will be computed again, has ``changed`` this, as it did not before;
        ``again``: what that does then."""
        log.warning(
            "overspill: unit %s has changed %s when it ran, as it did not before; backward "
            "computes it once more, and %s; pass activations='host' if it must not",
            self._found[unit].name, changed, again,
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
        self.computed[unit] += 1
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
        inputs: dict[int, torch.Tensor] = {}
        places: list[tuple[int, int]] = []  # of tensors among the leaves, and among the inputs
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                inputs.setdefault(id(leaf), leaf)
                places.append((i, list(inputs).index(id(leaf))))
                leaves[i] = None  # autograd has them, and may let them leave
        modes = [(each, each.training) for each in module.modules()]

        after: list[_State] = []  # as the forward has left the module

        def again(*inputs: torch.Tensor) -> None:
            if after and (changed := _changed(_state_of(module), after[0])) is not None:
                raise OffloadError(
                    f"{type(module).__name__}: {changed} has changed since its forward, which "
                    "backward computes again with it; change it after backward, or pass "
                    "activations='host'"
                )
            given = list(leaves)
            for i, number in places:
                given[i] = inputs[number]
            args, kwargs = torch_private.tree_unflatten(given, structure)
            now = [(each, each.training) for each, _ in modes]
            drawn_now = [_drawn() for _ in drawn]
            try:
                _set_modes(modes)
                _draw_from(drawn)
                recompute.compute(unit, partial(module, *args, **kwargs))
            finally:
                _set_modes(now)
                _draw_from(drawn_now)

        self._recompute, self._unit, self._module = recompute, unit, module
        drawn = [_drawn()]  # empty, where the forward has drawn nothing: other threads may
        self._before, self._drawn, self._after = _state_of(module), drawn, after
        self._weights = _weights_of(module)
        self._checkpoint: Checkpoint = torch_private.checkpoint(again, list(inputs.values()))
        next(self._checkpoint)

    def end(self, *, completed: bool) -> None:
        if not completed:
            self._checkpoint.close()
            return
        next(self._checkpoint, None)
        self._after.append(_state_of(self._module))
        changed = _changed(self._before, self._after[0])
        if changed is None:
            changed = _changed(self._weights, _weights_of(self._module))
        if changed is not None:
            self._recompute.surprised(self._unit, changed, "may change that again")
        if (changed := _changed(self._drawn[0], _drawn())) is None:
            self._drawn.clear()
        else:
            self._recompute.surprised(self._unit, changed, "draws the same again")


class _Watched:
    """A forward that is kept, to see whether it changes its module."""

    def __init__(
        self, recompute: Recompute, unit: int, module: nn.Module, leaves: Sequence[Any]
    ) -> None:
        self._recompute, self._unit, self._module = recompute, unit, module
        self._before, self._training = self._now(), module.training
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._inputs = [(t, torch_private.version_of(t)) for t in tensors]

    def _now(self) -> _State:
        return _state_of(self._module) | _weights_of(self._module) | _drawn()

    def end(self, *, completed: bool) -> None:
        if completed:
            changed = _changed(self._before, self._now())
            if any(torch_private.version_of(t) != version for t, version in self._inputs):
                changed = "its input"
            self._recompute.watched(self._unit, changed, training=self._training)


_PYTHON, _NUMPY = "Python's random numbers", "NumPy's random numbers"
# By name: a buffer or an attribute, held so that no other takes its place, and what tells whether
# it is as it was.
_State = dict[str, tuple[object, object]]


def _weights_of(module: nn.Module) -> _State:
    """Return the version of each parameter, to detect changes in place."""
    with torch_private.without_overrides():  # a hidden one's class would ask each time
        return {name: (p, torch_private.version_of(p)) for name, p in module.named_parameters()}


def _state_of(module: nn.Module) -> _State:
    """All that a forward may change, except parameters: optimizer updates change those too."""
    found: _State = {}
    for name, buffer in module.named_buffers():
        found[name] = buffer, torch_private.version_of(buffer)
    for prefix, each in module.named_modules():
        for name, value in module_private.own_attributes(each):
            found[f"{prefix}.{name}" if prefix else name] = value, _inside(value)
    return found


def _drawn() -> _State:
    """Where random numbers come from that a checkpoint does not bring back, as torch's own."""
    return {
        _PYTHON: (None, random.getstate()),
        _NUMPY: (None, pickle.dumps(np.random.get_state(legacy=False))),
    }


def _draw_from(drawn: Sequence[_State]) -> None:
    """Has random numbers come as they did then, if ever."""
    for each in drawn:
        python: Any = each[_PYTHON][1]
        numpy: Any = each[_NUMPY][1]
        random.setstate(python)
        np.random.set_state(pickle.loads(numpy))


def _inside(value: Any, depth: int = 0) -> object:
    """What tells that an object has changed that is the same as before."""
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), torch_private.version_of(value)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Iterator):
        return object()  # nobody can tell
    if depth == _DEEP or isinstance(value, (type, ModuleType, nn.Module)) or callable(value):
        return id(value)
    if isinstance(value, Mapping):
        return len(value), [(k, _inside(v, depth + 1)) for k, v in islice(value.items(), _LONG)]
    if isinstance(value, Collection):
        return len(value), [_inside(each, depth + 1) for each in islice(value, _LONG)]
    return id(value), _inside(getattr(value, "__dict__", None), depth + 1)


def _changed(before: _State, now: _State) -> str | None:
    """The first thing that is not as it was."""
    for name in {**before, **now}:
        was, found = before.get(name), now.get(name)
        if was is None or found is None or not _same(was, found):
            return name
    return None


def _obstacle(leaves: Sequence[Any]) -> str | None:
    """Why a forward that is called with these cannot be computed again."""
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            return "is called with a weight"
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            return (
                f"is called with an object of class {type(leaf).__name__} that it may change (a "
                "cache? pass use_cache=False)"
            )
    return "runs in compiled code" if torch_private.in_compiled_code() else None


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _same(was: tuple[object, object], found: tuple[object, object]) -> bool:
    """Another object is the same where it is plain, or a list of as many names or whole numbers
    (``peft`` names the active adapters in a new list)."""
    if was[0] is found[0]:
        return was[1] == found[1]
    if type(was[0]) is not type(found[0]):
        return False
    if isinstance(was[0], _VALUES):
        return was[0] == found[0]
    return _plain(found[0]) and _kinds(was[1]) == _kinds(found[1]) and was[1] == found[1]


def _plain(value: object) -> bool:
    """Whether ``_inside`` has all that such a list or tuple is."""
    short = type(value) in (list, tuple) and len(value) <= _LONG  # type: ignore[arg-type]
    return short and all(type(each) in _NAMES for each in value)  # type: ignore[attr-defined]


def _kinds(inside: Any) -> list[type]:
    """Of the members of a list, as ``_inside`` has it: 1 equals True."""
    return [type(each) for each in inside[1]]
