"""Copies of an optimizer with other parameters, whose own step is run on them."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Group = dict[str, Any]

_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip
_OWN = {*_HOOKS, "param_groups", "state", "step"}
_PLAIN = (bool, int, float, str, tuple, type(None))
_DEPTH = 3  # of containers in attributes that are searched


class UnsuitableError(Exception):
    """An optimizer cannot be stepped parameter by parameter; the text says why."""


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the full name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def bare(optimizer: torch.optim.Optimizer, *, apart: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and attributes, without parameters, state and hooks.

    Args:
        apart: copy containers and tensors in attributes, so that a step changes only the copy.
    """
    own = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if name not in _OWN:
            own.__dict__[name] = copied(value) if apart else value
    own.__dict__.update({name: collections.OrderedDict() for name in _HOOKS})
    own.param_groups, own.state = [], collections.defaultdict(dict)
    return own


def options_of(group: Mapping[str, Any]) -> Group:
    """Return a copy of a group without its parameters."""
    return {
        name: copied(value) for name, value in group.items()
        if name not in ("params", "param_names")
    }  # fmt: skip


def shared_copies(groups: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return copies of groups without parameters; what they share, the copies share as well."""
    memo: dict[int, Any] = {}
    return [
        {
            name: _copied_once(value, memo) for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in groups
    ]  # fmt: skip


def _copied_once(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) not in memo:
        memo[id(value)] = copied(value)
    return memo[id(value)]


def group_of(
    group: Mapping[str, Any], params: Sequence[nn.Parameter], *, named: bool = False
) -> Group:
    """Return a group with the same hyper-parameters and other parameters."""
    return with_params(options_of(group), params, named=named)


def with_params(options: Group, params: Sequence[nn.Parameter], *, named: bool) -> Group:
    """Return a group with these hyper-parameters themselves, and parameters."""
    names = {"param_names": [f"p{n}" for n in range(len(params))]} if named else {}
    return {**options, **names, "params": list(params)}


def copied(value: Any) -> Any:
    """Return a copy of a tensor or container; other values, and what cannot be copied, as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (dict, list, set, bytearray, collections.deque)):
        try:
            return copy.deepcopy(value)
        except Exception:
            return value
    return value


def stepped(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: nn.Parameter,
    state: dict[str, Any], *, apart: bool = False,
) -> Group:  # fmt: skip
    """Run an optimizer's own step on one parameter.

    Args:
        optimizer: gives class and attributes.
        group: hyper-parameters; it is not changed.
        param: has a gradient, and is changed.
        state: of the parameter; it is changed.
        apart: see ``bare``.

    Returns:
        The hyper-parameters after the step.
    """
    own = _with_one(optimizer, group, param, state, apart=apart)
    step(own)
    found = own.state.get(param, {})
    if found is not state:
        state.clear()
        state.update(found)
    return options_of(own.param_groups[0])


def called(
    optimizer: torch.optim.Optimizer, method: str, group: Mapping[str, Any], param: nn.Parameter,
    state: dict[str, Any],
) -> Group:  # fmt: skip
    """Call a method of an optimizer for one parameter, if it has one; return its group after it."""
    own = _with_one(optimizer, group, param, state, apart=True)
    if callable(run := getattr(own, method, None)):
        run()
    return options_of(own.param_groups[0])


def _with_one(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: nn.Parameter,
    state: dict[str, Any], *, apart: bool,
) -> torch.optim.Optimizer:  # fmt: skip
    own = bare(optimizer, apart=apart)
    own.param_groups.append(group_of(group, [param], named="param_names" in group))
    if state:
        own.state[param] = state
    return own


def step(optimizer: torch.optim.Optimizer) -> None:
    """Call an optimizer's step without hooks, which are the wrapped optimizer's."""
    run: Any = type(optimizer).step
    run = run.__wrapped__ if getattr(run, "hooked", False) else run
    with torch.no_grad():
        run(optimizer)


def refresh(own: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    """Take over attributes of an optimizer that are numbers, texts and the like."""
    for name, value in source.__dict__.items():
        if name not in _OWN and isinstance(value, _PLAIN):
            own.__dict__[name] = value


def attributes_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a text that differs if an attribute that is a number or a text differs."""
    return repr({
        name: value for name, value in optimizer.__dict__.items()
        if name not in _OWN and not name.startswith("_") and isinstance(value, _PLAIN)
    })  # fmt: skip


def refuse_attributes(optimizer: torch.optim.Optimizer) -> None:
    """Check that a copy with other parameters would not use those of the optimizer itself.

    Raises:
        UnsuitableError: it would, or the optimizer's step was replaced.
    """
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in optimizer.__dict__.items():
        if name == "step" and not hasattr(value, "_wrapped_by_lr_sched"):
            raise UnsuitableError("its step was replaced on the instance")
        for each in () if name in _OWN else _reached(value, _DEPTH):
            owner = getattr(each, "__self__", None)
            if (
                isinstance(each, (torch.optim.Optimizer, nn.Module)) or id(each) in params
                or isinstance(owner, torch.optim.Optimizer)
            ):  # fmt: skip
                raise UnsuitableError(
                    f"its attribute {name!r} refers to parameters, a model or an optimizer"
                )


def _reached(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _reached(each, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, collections.deque)):
        for each in value:
            yield from _reached(each, depth - 1)


def changed_attribute(
    before: Mapping[str, Any], optimizer: torch.optim.Optimizer, params: Sequence[Tensor]
) -> str | None:
    """Return an attribute in which an optimizer has kept state over its steps.

    Args:
        before: copies of the attributes from before.
        params: the parameters that it has stepped.
    """
    own = set(map(id, params))
    for name, value in optimizer.__dict__.items():
        if name in _OWN or name.startswith("_") or isinstance(value, bool):
            continue
        counts = isinstance(value, (int, float, Tensor))
        if counts and not same_value(before.get(name), value):
            return name
        if any(id(each) in own for each in _reached(value, _DEPTH)):
            return name
    return None


def same_value(one: Any, other: Any) -> bool:
    """Return whether two hyper-parameters or attributes are equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = torch.as_tensor(one), torch.as_tensor(other)
        if both[0].shape != both[1].shape:
            return False
        a, b = both
        return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN equals NaN
    if isinstance(one, float) and isinstance(other, float) and one != one and other != other:
        return True
    if type(one) is not type(other):
        return False
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
