"""Loading of a model's weights and state into the engine, unit by unit, freeing the originals."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import nn

from ..observe.long_work import LongWork
from ..optim import Rule
from ..optim.averaged import AVERAGE
from ..optim.optimizer_base import torch_state
from ..optim.streamed import RECORD, StreamedRule
from ..planning.models import by_model
from ..planning.partition import Partition
from ..planning.sources import SourceReader
from ..schedule.units import ParamSpec, Unit
from .adapters import begin_adapters
from .contents import Values
from .edits import spoil
from .engine_resources import EngineResources
from .importing import match_weights, other_tensors
from .in_place import is_from_files
from .initial import initialise, initialiser
from .original_weights import OriginalWeights
from .unmanaged import require_values
from .weight_files import TensorFiles

LARGEST_SHARE = 0.9  # of a dtype's maximum: a scale that is rounded may be larger


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    resources: EngineResources,
    taken: OriginalWeights,
) -> None:
    """Load all weights and state, one unit at a time, from the model or from ``weights=`` files."""
    runtime = resources.runtime
    parts, config, blueprint = runtime.parts, runtime.config, runtime.blueprint
    matched = None if config.weights is None else match_weights(config.weights, model, parts)
    files = None if matched is None else matched.files
    names = {} if matched is None else matched.names
    name_of = {id(parts.parameters[index]): name for index, name in names.items()}
    for each in by_model(model).values():
        begin_adapters(each, partial(_reader, files, name_of), trains=runtime.layout.trains)
    if matched is not None:
        taken.note()
        for others in other_tensors(matched, model, parts, config.ignore_weights or ()):
            others.load()
    require_values(model, _initialised(parts, names))
    init = initialiser(model, config.init)
    taken.move_unmanaged()
    for index, p in enumerate(parts.parameters):
        rule = blueprint.rule_of(index)
        if rule is not None:
            runtime.ledger.steps[index] = rule.steps_taken(optimizer.state.get(p, {}))
    _require_finite(parts, names)

    quantised = SourceReader(blueprint.sources)

    def load_unit(unit: Unit) -> None:
        if unit.index in runtime.layout.in_place:
            resources.contents.show_in_place(unit.index)
            taken.free(unit, theirs=False)
            return
        if is_from_files(unit):
            resources.contents.load_page(
                unit.index, lambda page: quantised.read(unit.index, page.numpy())
            )
            taken.free(unit, theirs=False)
            return
        specs = {spec.index: spec for _, spec in unit.params}
        made: Mapping[int, torch.Tensor] = {}
        empty = {i: s for i, s in specs.items() if parts.parameters[i].is_meta and i not in names}
        if empty:
            made = initialise(parts.found[unit.index], empty, parts, init)

        def weight_of(index: int, made: Mapping[int, torch.Tensor] = made) -> torch.Tensor:
            if files is not None and index in names:
                p = parts.parameters[index]
                dtype = config.weight_dtype if p.is_floating_point() else None
                return _read(files, names[index], dtype or p.dtype)
            return made.get(index, parts.parameters[index].data)

        values = values_of_unit(blueprint.rules, parts, optimizer, weight_of)
        finite = resources.contents.load(unit.index, values, first=True)
        if not finite and runtime.store.writer is not None:
            spoil(runtime.executor, unit)
        taken.free(unit, theirs=not unit.packed and names.keys().isdisjoint(specs))

    total = sum(u.weight_bytes for u in parts.units)
    with closing(quantised), LongWork("loading weights", total) as done:
        for unit in parts.units:
            load_unit(unit)
            done(unit.weight_bytes)


def _reader(
    files: TensorFiles | None, name_of: Mapping[int, str], p: nn.Parameter
) -> Callable[[], torch.Tensor] | None:
    """Return a function that reads a parameter's weight; ``None`` if the files do not have it."""
    name = name_of.get(id(p))
    if files is None or name is None:
        return None
    return lambda: _read(files, name, p.dtype).to(p.dtype)


def _initialised(parts: Partition, names: Container[int]) -> frozenset[int]:
    """Return the ids of parameters in files, and of those that an initialiser can fill."""
    return frozenset(
        id(p) for index, p in enumerate(parts.parameters)
        if index in names or p.is_floating_point() or p.is_complex()
    )  # fmt: skip


def _read(files: TensorFiles, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read a weight; one that is quantised as its library dequantises it to ``dtype``."""
    value = files.read(name)
    return value if files.find_quantised(name) is None else value.to(dtype)


def _require_finite(parts: Partition, names: Container[int]) -> None:
    """Check weights that are in memory and are to be packed, before any original is freed.

    Raises:
        ValueError: a weight is not finite, or may not be finite after unpacking.
    """
    for unit in parts.units:
        for (chunk, spec), part in zip(unit.params, unit.page, strict=False):
            value = parts.parameters[spec.index].detach()
            if part.form is None or spec.index in names or value.is_meta:
                continue
            most = float(value.cpu().abs().amax())  # NaN, if there is one
            if not most <= LARGEST_SHARE * torch.finfo(chunk.dtype).max:
                name = parts.shown_names[spec.index]
                raise ValueError(
                    f"{name}: {most:.3g} is too large for {chunk.dtype} kept as "
                    f"{part.form.describe()}, or not finite; leave frozen= out, or mend the weight"
                )


def values_of_unit(
    rules: Sequence[Rule], parts: Partition, optimizer: torch.optim.Optimizer,
    weight_of: Callable[[int], torch.Tensor],
) -> Callable[[ParamSpec], Values]:  # fmt: skip
    """Return the function that ``Contents.load`` calls for a parameter's values.

    It returns the weight (the optimizer's master, if it has one), and the moments that the
    optimizer has or the rule starts with.
    """

    def values(spec: ParamSpec) -> Values:
        p = parts.parameters[spec.index]
        tensors = {"weight": weight_of(spec.index).detach()}
        group = parts.groups[spec.index]
        if group is None:
            return tensors
        rule = rules[group]
        if isinstance(rule, StreamedRule):
            if state := dict(optimizer.state.get(p, {})):
                tensors[RECORD] = rule.stored(state, spec.shape)
            return tensors
        for name, value in rule.initial(optimizer.param_groups[group]).items():
            if value != 0.0:
                tensors[name] = torch.full(spec.shape, value, dtype=torch.float32, device="cpu")
        for name, value in torch_state(optimizer, p).items():
            if name in (*rule.moments, "master") and value is not None:
                tensors["weight" if name == "master" else name] = value
        if AVERAGE in rule.moments and rule.steps_taken(optimizer.state.get(p, {})):
            tensors.setdefault(AVERAGE, tensors["weight"])  # averaging starts now
        return tensors

    return values
