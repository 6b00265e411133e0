"""Moves a model's weights and state to their homes, and frees the originals."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .engine import Engine
from .importing import open_weights
from .loading import default_init, initialise, match_files, values_of_unit
from .runtime import torch_private
from .schedule.partition import Unit


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Fills all homes, one unit at a time, from the model or from ``weights=`` files."""
    parts, config = engine.parts, engine.config
    files = None if config.weights is None else open_weights(config.weights)
    names = {} if files is None else match_files(files, model, parts)
    init = config.init or default_init(model)
    for index, p in enumerate(parts.parameters):
        rule = engine.blueprint.rule_of(index)
        if rule is not None:
            engine.ledger.steps[index] = rule.steps_taken(optimizer.state.get(p, {}))
    for unit in parts.units:
        specs = {spec.index: spec for _, spec in unit.params}
        made: Mapping[int, torch.Tensor] = {}
        if files is None and any(parts.parameters[i].is_meta for i in specs):
            made = initialise(parts.found[unit.index], specs, parts, init)

        def weight_of(index: int, made: Mapping[int, torch.Tensor] = made) -> torch.Tensor:
            if files is not None:
                return files.load(names[index])
            return made.get(index, parts.parameters[index].data)

        values = values_of_unit(engine.blueprint.rules, parts, optimizer, weight_of)
        if not engine.contents.fill(unit.index, values, first=True):
            engine.spoiled(unit.index)
        free_unit(engine, unit)
    move_buffers(model, engine)


def free_unit(engine: Engine, unit: Unit) -> None:
    """Frees the originals of a unit: its parameters keep their shape, and hold one NaN."""
    stubs = engine.residences.stubs.of(unit)
    for (_, spec), stub in zip(unit.params, stubs, strict=True):
        torch_private.become(engine.parts.parameters[spec.index], stub)


def move_buffers(model: nn.Module, engine: Engine) -> None:
    """Brings every buffer to the device."""
    device = engine.accelerator.device
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
