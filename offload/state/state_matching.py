"""Matching of a loaded optimizer state with parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

log = logging.getLogger("overspill")

NAMES = "param_names"  # key in a state dict: by group, the names of its parameters
Given = Mapping[int, Mapping[str, Any]]  # states by the id of their parameter
Groups = Sequence[Mapping[str, Any]]


def matched(
    model: nn.Module, groups: Groups, names: Sequence[Sequence[str]],
    state_dict: Mapping[str, Any],
) -> tuple[Given, Sequence[dict[str, Any]]]:  # fmt: skip
    """Match a loaded optimizer state with the parameters and groups of this optimizer.

    If the state has parameter names and the model or its groups have changed, match by name;
    parameters without an entry start with empty state, which is logged. Otherwise the groups must
    have the same sizes, and parameters are matched by their group's ``param_names`` or by position.

    Args:
        names: the names of the parameters in ``groups``.

    Returns:
        The state of each parameter that has some, and a loaded group for each group.

    Raises:
        ValueError: groups or names differ, so that the state cannot be matched.
    """
    state, loaded_groups = state_dict["state"], state_dict["param_groups"]
    theirs = state_dict.get(NAMES)
    if theirs is not None and theirs != names and _common(theirs, names):
        return _by_name(groups, names, theirs, state, loaded_groups)
    mine = [len(group["params"]) for group in groups]
    sizes = [len(group["params"]) for group in loaded_groups]
    if sizes != mine:
        raise ValueError(f"the state has param groups of {sizes} parameters, expected {mine}")
    given: Given = {
        id(p): state[number]
        for group, loaded in zip(groups, loaded_groups, strict=True)
        for p, number in zip(group["params"], _numbers(model, group, loaded), strict=True)
        if number in state
    }
    return given, loaded_groups


def _common(theirs: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> bool:
    known = {name for group in mine for name in group}
    return any(name in known for group in theirs for name in group)


def _by_name(
    groups: Groups, names: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]],
    state: Mapping[int, Mapping[str, Any]], loaded_groups: Groups,
) -> tuple[Given, Sequence[dict[str, Any]]]:  # fmt: skip
    numbers = {
        name: number
        for loaded, group in zip(loaded_groups, theirs, strict=True)
        for name, number in zip(group, loaded["params"], strict=True)
    }
    group_of = {name: number for number, group in enumerate(theirs) for name in group}
    wanted = {name for group in names for name in group}
    shapes = {
        name: p.shape for group, own in zip(groups, names, strict=True)
        for p, name in zip(group["params"], own, strict=True)
    }  # fmt: skip
    renamed = {
        now: before for now, before in _renamed(theirs, names).items()
        if numbers[before] in state and _fits(state[numbers[before]], shapes[now])
    }  # fmt: skip
    if renamed:
        log.warning(
            "overspill: the loaded state is used for parameters that were renamed: %s",
            _listed([f"{before} -> {now}" for now, before in renamed.items()]),
        )  # fmt: skip
        numbers |= {now: numbers[before] for now, before in renamed.items() if before in numbers}
        wanted |= set(renamed.values())
    unused = sorted(name for name, n in numbers.items() if n in state and name not in wanted)
    if unused:
        first = unused[0]
        raise ValueError(
            f"the loaded state has entries for {_listed(unused)}, which this optimizer does not "
            f"train; delete them (del state_dict['state'][{numbers[first]}] for {first!r}) to load "
            "the rest"
        )
    given, fresh, found = {}, [], []
    for group, own in zip(groups, names, strict=True):
        for p, name in zip(group["params"], own, strict=True):
            if name in numbers and numbers[name] in state:
                given[id(p)] = state[numbers[name]]
            elif state:
                fresh.append(name)
        known = next((group_of[name] for name in own if name in group_of), None)
        found.append(dict(group if known is None else loaded_groups[known]))
    if fresh:
        log.warning(
            "overspill: the loaded state has no entries for %s; their optimizer state starts empty",
            _listed(fresh),
        )
    return given, found


def _renamed(
    theirs: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]
) -> dict[str, str]:  # fmt: skip
    """Return the former names of parameters that a module has renamed, by their present names.

    Pruning and parametrizations rename a parameter within its module, such as ``weight`` to
    ``weight_orig`` or ``parametrizations.weight.original``. Other new names are not matched.
    """
    before = {name for group in theirs for name in group}
    now = {name for group in mine for name in group}
    gone = [name for group in theirs for name in group if name not in now]
    added = [name for group in mine for name in group if name not in before]
    former = {_unmarked(name): name for name in gone}
    counts = Counter(map(_unmarked, [*gone, *added]))
    return {
        name: former[_unmarked(name)]
        for name in added if _unmarked(name) in former and counts[_unmarked(name)] == 2
    }  # fmt: skip


def _fits(values: Mapping[str, Any], shape: torch.Size) -> bool:
    """Return whether values of state in memory have the shape of the parameter."""
    tensors = values.values() if isinstance(values, dict) else ()
    return all(t.shape == shape for t in tensors if isinstance(t, torch.Tensor) and t.dim())


def _unmarked(name: str) -> str:
    """Return a parameter's name without what pruning or a parametrization has added to it."""
    path, _, own = name.removesuffix(".original").rpartition(".")
    holder, _, last = path.rpartition(".")
    if name.endswith(".original") and last == "parametrizations":
        return f"{holder}.{own}" if holder else own
    return name.removesuffix("_orig")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _numbers(model: nn.Module, group: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[int]:
    """Return the loaded state's numbers for a group's parameters, in the group's order."""
    numbers: list[int] = list(loaded["params"])
    if "param_names" not in loaded:
        return numbers
    number_of = dict(zip(loaded["param_names"], numbers, strict=True))
    names: dict[int, list[str]] = {id(p): [] for p in group["params"]}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.get(id(p), []).append(name)
    for name, p in zip(group.get("param_names", ()), group["params"], strict=False):
        names[id(p)].append(name)
    found = []
    for p in group["params"]:
        match = next((name for name in names[id(p)] if name in number_of), None)
        if match is None:
            raise ValueError(
                f"the state's param_names lack {names[id(p)][0]!r} in this group, which has "
                f"{sorted(number_of)[:3]} and others; build the optimizer with the same "
                "groups, or remove param_names to match by place"
            )
        found.append(number_of.pop(match))
    return found


def check_values(
    name: str, moments: Sequence[str], shape: torch.Size, given: Mapping[str, Any], *, whole: bool
) -> None:
    """Check values that a user sets in the state of a parameter.

    Raises:
        ValueError: one is unknown or has another shape; or, if ``whole``, one is missing.
    """
    names = {"step", "master", *moments}
    for key, value in given.items():
        if key not in names:
            raise ValueError(
                f"the state of {name!r} has no {key!r}; it has "
                f"{', '.join(sorted(names - {'master'}))}"
            )
        found = tuple(torch.as_tensor(value).shape)
        expected = () if key == "step" else tuple(shape)
        if found != expected and not (key == "step" and found == (1,)):
            raise ValueError(f"{key!r} of the state of {name!r} has shape {expected}, got {found}")
    missing = sorted(names - {"master"} - given.keys()) if whole else []
    if missing:
        raise ValueError(f"the state of {name!r} needs {', '.join(missing)} as well")
