"""What a forward may change: the state of its module, and random number generators."""

from __future__ import annotations

import pickle
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..private import module_private, torch_private

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_NAMES = (bool, int, str, type(None))
_DEEP, _LONG = 3, 256  # depth, and number of members, up to which attributes are compared
# Attributes that models of transformers set in their shared config when they run, for their heads.
_OF_HEADS = {"problem_type"}
_PYTHON, _NUMPY = "Python's random numbers", "NumPy's random numbers"
# By name: a buffer or an attribute, held so that its identity is not reused, and a value that
# differs once it has changed.
State = dict[str, tuple[object, object]]


def weights_of(module: nn.Module) -> State:
    """Return the version of each parameter, to detect changes in place.

    Nothing under FSDP2, where a module has gathered weights while it runs, and shards afterwards.
    """
    if module_private.is_sharded(module):
        return {}
    with torch_private.without_overrides():  # reading a hidden one would ask its class
        return {name: (p, torch_private.version_of(p)) for name, p in module.named_parameters()}


def state_of(module: nn.Module) -> State:
    """Return the state of a module that its forward may change, except parameters.

    Parameters are left out because optimizer updates change them too.
    """
    found: State = {}
    for name, buffer in module.named_buffers():
        found[name] = buffer, torch_private.version_of(buffer)
    for prefix, each in module.named_modules():
        for name, value in module_private.own_attributes(each):
            found[f"{prefix}.{name}" if prefix else name] = value, _inside(value)
    return found


def random_numbers() -> State:
    """Return the states of random number generators that a checkpoint does not restore."""
    return {
        _PYTHON: (None, random.getstate()),
        _NUMPY: (None, pickle.dumps(np.random.get_state(legacy=False))),
    }


def draw_from(drawn: Sequence[State]) -> None:
    """Restore the states that ``random_numbers`` returned, if there are any."""
    for each in drawn:
        python: Any = each[_PYTHON][1]
        numpy: Any = each[_NUMPY][1]
        random.setstate(python)
        np.random.set_state(pickle.loads(numpy))


def _inside(value: Any, depth: int = 0) -> object:
    """Return a value that differs once the contents of ``value`` have changed."""
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
        return object()  # unknown, so always different
    if depth == _DEEP or isinstance(value, (type, ModuleType, nn.Module)) or callable(value):
        return id(value)
    if isinstance(value, Mapping):
        return len(value), [(k, _inside(v, depth + 1)) for k, v in islice(value.items(), _LONG)]
    if isinstance(value, Collection):
        return len(value), [_inside(each, depth + 1) for each in islice(value, _LONG)]
    own = getattr(value, "__dict__", None)
    if own is not None and type(value).__module__.startswith("transformers."):
        own = {name: each for name, each in own.items() if name not in _OF_HEADS}
    return id(value), _inside(own, depth + 1)


def first_changed(before: State, now: State) -> str | None:
    """Return the name of the first entry that has changed."""
    for name in {**before, **now}:
        was, found = before.get(name), now.get(name)
        if was is None or found is None or not _same(was, found):
            return name
    return None


def _same(was: tuple[object, object], found: tuple[object, object]) -> bool:
    """Return whether an entry is unchanged.

    Another object counts as the same if it is plain and equal, or an equal list of names or
    integers (``peft`` lists the active adapters in a new list).
    """
    if was[0] is found[0]:
        return was[1] == found[1]
    if type(was[0]) is not type(found[0]):
        return False
    if isinstance(was[0], _VALUES):
        return was[0] == found[0]
    return _plain(found[0]) and _kinds(was[1]) == _kinds(found[1]) and was[1] == found[1]


def _plain(value: object) -> bool:
    """Return whether ``value`` is a list or tuple that ``_inside`` describes completely."""
    short = type(value) in (list, tuple) and len(value) <= _LONG  # type: ignore[arg-type]
    return short and all(type(each) in _NAMES for each in value)  # type: ignore[attr-defined]


def _kinds(inside: Any) -> list[type]:
    """Return the types of a list's members, as ``_inside`` returned them, because 1 equals True."""
    return [type(each) for each in inside[1]]


def set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Put modules into training or evaluation mode, each by itself."""
    for module, training in modes:
        module.training = training
