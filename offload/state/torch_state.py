"""The optimizer's state in torch's own format, out of the engine and into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..engine import Engine
from ..schedule.units import ParamSpec
from .contents import STATE

Groups = Sequence[dict[str, Any]]


def torch_state(engine: Engine, groups: Groups) -> dict[str, Any]:
    """What ``torch.optim.Optimizer.state_dict`` gives: fp32 moments of all that took a step, and
    the exact ``master`` of a weight that has one."""
    order = {id(p): i for i, p in enumerate(p for g in groups for p in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    if any(engine.ledger.steps):
        engine.settle()
        for unit in engine.parts.units:
            found = engine.contents.masters(unit.index, stored=True)
            exact = {spec.index: {"master": value} for spec, value in found}
            for spec, values in engine.contents.state(unit.index):
                step = engine.ledger.steps[spec.index]
                if step:
                    number = order[id(engine.parts.parameters[spec.index])]
                    master = exact.get(spec.index, {})
                    state[number] = {
                        "step": torch.tensor(float(step), device="cpu"),
                        **values,
                        **master,
                    }
    start, kept = 0, []
    for group in groups:
        numbers = list(range(start, start + len(group["params"])))
        start += len(numbers)
        kept.append({**group, "params": numbers})
    return {"state": dict(sorted(state.items())), "param_groups": kept}


def load_torch_state(engine: Engine, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Takes over what ``torch_state`` or torch's own ``state_dict`` gave.

    Raises:
        ValueError: other groups or names, or tensors of other shapes; nothing was changed.
    """
    engine.raise_if_unusable()
    state, loaded_groups = state_dict["state"], state_dict["param_groups"]
    mine = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in loaded_groups]
    if theirs != mine:
        raise ValueError(f"the state has param groups of {theirs} parameters, expected {mine}")
    by_id: dict[int, Mapping[str, Any]] = {
        id(p): state[number]
        for group, loaded in zip(groups, loaded_groups, strict=True)
        for p, number in zip(group["params"], _numbers(engine.model, group, loaded), strict=True)
        if number in state
    }

    def given(index: int) -> Mapping[str, Any]:
        return by_id.get(id(engine.parts.parameters[index]), {})

    _check_shapes(engine, by_id)
    for rule, group, loaded in zip(engine.blueprint.rules, groups, loaded_groups, strict=True):
        rule.scalars({**group, **loaded}, 1)
    engine.weights.settle()
    parts = {
        unit.index: {STATE, *(p.index for _, p in unit.params if "master" in given(p.index))}
        for unit in engine.parts.units
        if unit.trainable
    }
    with engine.editing(parts) as spoil:
        for unit in engine.parts.units:
            if unit.trainable:
                values = _values(engine, groups, by_id, unit.index)
                if not engine.contents.fill(unit.index, values, first=False):
                    spoil(unit.index)
                if len(parts[unit.index]) > 1:
                    engine.stepping.changed(unit.index, parts[unit.index])
        for index in range(len(engine.parts.parameters)):
            own = engine.blueprint.rule_of(index)
            engine.ledger.steps[index] = 0 if own is None else own.steps_taken(given(index))
        for group, loaded in zip(groups, loaded_groups, strict=True):
            group.update({k: v for k, v in loaded.items() if k not in ("params", "param_names")})


def _numbers(model: nn.Module, group: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[int]:
    """The numbers that the loaded state has for a group's parameters, in the group's order."""
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


def _check_shapes(engine: Engine, by_id: Mapping[int, Mapping[str, Any]]) -> None:
    for index, p in enumerate(engine.parts.parameters):
        rule, given = engine.blueprint.rule_of(index), by_id.get(id(p), {})
        if rule is None:  # it is not trained, and has no state here
            continue
        known = {"step", "master", *rule.moments}
        for name in given:
            if name not in known:
                raise ValueError(f"the state has {name!r}; this optimizer's has {sorted(known)}")
            like = getattr(given, "like", None)  # what is still on disk is not read for this
            value = given[name] if like is None else like(name)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != p.shape:
                raise ValueError(
                    f"state {name!r} has shape {tuple(value.shape)}, expected {tuple(p.shape)}"
                )


def _values(
    engine: Engine, groups: Groups, by_id: Mapping[int, Mapping[str, Any]], unit: int
) -> Callable[[ParamSpec], Mapping[str, torch.Tensor] | None]:
    """What a unit's parameters are filled with: what was given, else how the rule starts."""

    def values(spec: ParamSpec) -> Mapping[str, torch.Tensor] | None:
        given = by_id.get(id(engine.parts.parameters[spec.index]), {})
        group, rule = engine.parts.groups[spec.index], engine.blueprint.rule_of(spec.index)
        if group is None or rule is None:
            return None
        starts = rule.initial(groups[group])
        master = {} if given.get("master") is None else {"weight": given["master"]}
        return master | {
            name: torch.full(spec.shape, starts.get(name, 0.0), device="cpu")
            if given.get(name) is None
            else given[name]
            for name in rule.moments
        }

    return values
