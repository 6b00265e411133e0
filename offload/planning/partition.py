"""The partition of a model into units and chunks: names, shapes and offsets, but no data.

A unit is moved as a whole.  A chunk has the parameters of a unit with one dtype and one param
group, flattened; or one parameter, if its optimizer updates it as a whole.  Every parameter is
aligned to 64 bytes (other offsets change matmul results in the last bit), and every chunk to 4096
bytes (direct I/O).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ..schedule.units import PAGE, PARAM_ALIGN, Chunk, ParamSpec, Unit, align
from .models import entries
from .products import (
    activation_bytes,
    attention,
    backward_flops,
    forward_flops,
    input_bytes,
    logits_bytes,
)
from .reached_modules import reached_modules
from .stand_ins import StandInModel, is_hooked, parameters_named, running, staying, whole_name
from .unit_discovery import ROOT, FoundUnit, find_units, unit_parameters

FROZEN = "(frozen)"  # name suffix of the unit with the frozen weights of a trained unit

_Members = list[tuple[int, str, nn.Parameter]]  # parameters of a unit: index, name, parameter


@dataclass(frozen=True)
class Partition:
    """The units of a model, their modules, and its parameters.

    Attributes:
        found: by unit, its module; a unit that does not run has the module of the one that shares
            its weights.
        parameters: by parameter index.
        unit_of: by parameter index, the unit that owns it.
        hooked: the units whose weights the engine's hooks bring to modules. All are, except shards,
            which FSDP2 or DDP gathers.
        external: whether the model runs through an ``ExternalForwardAdapter``, with or without such
            units.
    """

    units: tuple[Unit, ...]
    found: tuple[FoundUnit, ...]
    parameters: tuple[nn.Parameter, ...]
    unit_of: tuple[int, ...]
    hooked: frozenset[int] = frozenset()
    external: bool = False

    @property
    def weight_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """By parameter index, the name of the parameter in the model."""
        found = {spec.index: spec.name for unit in self.units for _, spec in unit.params}
        return tuple(found[index] for index in range(len(self.parameters)))

    @cached_property
    def shown_names(self) -> tuple[str, ...]:
        """By parameter index, the name by which users know the parameter."""
        return tuple(map(whole_name, self.names)) if self.external else self.names

    @cached_property
    def groups(self) -> tuple[int | None, ...]:
        """By parameter index, the param group; ``None`` for one that is never updated."""
        found = {s.index: chunk.group for unit in self.units for chunk, s in unit.params}
        return tuple(found[index] for index in range(len(self.parameters)))

    @property
    def running(self) -> Iterator[tuple[int, FoundUnit]]:
        """The units that run, as (index, module)."""
        return ((u.index, f) for u, f in zip(self.units, self.found, strict=True) if u.runs)

    def units_of(self, modules: Container[nn.Module]) -> frozenset[int]:
        """Return the units that are among these modules."""
        return frozenset(unit for unit, found in self.running if found.module in modules)

    @cached_property
    def recomputable(self) -> frozenset[int]:
        """The units that can be recomputed: whole modules, except the last unit.

        Backward needs at once what the last unit saves.
        """
        last = len(self.units) - 1
        return frozenset(
            unit for unit, found in self.running if unit != last and not found.direct_only
        )


def _dense_stride(p: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides if its memory is dense, else contiguous strides."""
    pairs = sorted((s, n) for s, n in zip(p.stride(), p.shape, strict=True) if n > 1)
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= size
    return p.stride()


def _spec(index: int, name: str, p: torch.Tensor, offset: int) -> ParamSpec:
    shape, stride, numel = tuple(p.shape), _dense_stride(p), p.numel()
    if not p.is_complex():
        return ParamSpec(index, name, shape, stride, numel, offset)
    parts = (*(2 * step for step in stride), 1)
    return ParamSpec(index, name, (*shape, 2), parts, 2 * numel, offset, is_complex=True)


def _layout(
    own: _Members,
    groups: Mapping[nn.Parameter, int],
    dtype: torch.dtype | None,
    granule: int,
    whole: Container[int],
) -> tuple[tuple[Chunk, ...], int, int]:
    """Return the chunks of a unit, trained ones first, and the bytes of its weight and gradient
    slots."""
    keyed: dict[tuple[torch.dtype, int | None, int], _Members] = {}
    for index, name, p in own:
        group = groups.get(p) if p.requires_grad else None
        kind = p.dtype.to_real() if p.is_complex() else p.dtype
        if dtype is not None and p.is_floating_point() and p.element_size() > 1:
            kind = dtype
        apart = index if group is not None and group in whole else -1
        keyed.setdefault((kind, group, apart), []).append((index, name, p))
    chunks: list[Chunk] = []
    byte_offset = grad_offset = 0
    for (kind, group, apart), members in sorted(
        keyed.items(),
        key=lambda item: (item[0][1] is None, item[0][1] or 0, str(item[0][0]), item[0][2]),
    ):
        specs: list[ParamSpec] = []
        offset = 0
        border = max(PARAM_ALIGN // kind.itemsize, granule)
        for index, name, p in members:
            specs.append(_spec(index, name, p, offset))
            offset += align(max(specs[-1].numel, 1), border)
        chunk = Chunk(
            kind, group, offset, byte_offset, grad_offset, tuple(specs), whole=apart >= 0
        )  # fmt: skip
        chunks.append(chunk)
        byte_offset += align(chunk.nbytes, PAGE)
        if group is not None:
            grad_offset += align(chunk.nbytes, PAGE)
    return tuple(chunks), byte_offset, grad_offset


def _members(
    item: FoundUnit, all_trained: Container[nn.Parameter], owner: Container[nn.Parameter],
    parameters: list[nn.Parameter],
) -> tuple[_Members, _Members, list[nn.Parameter]]:  # fmt: skip
    """Sort the parameters of a unit, and append the ones that it owns to ``parameters``.

    Returns:
        The trained and the frozen parameters that the unit owns, since it is the first to read
        them; and the parameters that have an ``owner`` already or occur again in the unit.
    """
    trained, frozen, shared = _Members(), _Members(), list[nn.Parameter]()
    seen = set[nn.Parameter]()
    for name, p in unit_parameters(item):
        if p in owner or p in seen:
            shared.append(p)
            continue
        (trained if p in all_trained else frozen).append((len(parameters), name, p))
        seen.add(p)
        parameters.append(p)
    return trained, frozen, shared


def partition(
    model: nn.Module,
    groups: Mapping[nn.Parameter, int],
    *,
    names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    granule: int = 1,
    whole: Container[int] = (),
) -> Partition:
    """Divide ``model`` into units and lay out their slots.

    A parameter that several units read belongs to the first
    one.  The frozen parameters of a unit with trained ones form a separate unit before it, which is
    onloaded with it.  They never change, so they are moved and stored separately.

    Args:
        groups: the param-group index of every parameter that the optimizer has.
        names: modules that form units; ``None``: find them.
        dtype: of all floating-point weights except complex ones; ``None``: each keeps its own.
        granule: alignment of parameters in elements (a power of two), because the optimizer's state
            cannot be divided elsewhere.
        whole: param groups whose parameters each form a chunk, because they are updated as a whole.
    """
    owner: dict[nn.Parameter, int] = {}
    parameters: list[nn.Parameter] = []
    units: list[Unit] = []
    of_units: list[FoundUnit] = []
    found = find_units(model, names)
    all_trained = {p for p in model.parameters() if p.requires_grad and p in groups}
    beside = _without_backward(model, all_trained)
    flows = external = False
    divided = model.tensor_ranks if isinstance(model, StandInModel) else 1
    for item in found:
        ran, learns = running(item), all_trained
        if ran is not item:
            external, learns = True, {p for p in ran.module.parameters() if p.requires_grad}
        trained, frozen, shared = _members(item, all_trained, owner, parameters)
        hooked = any(is_hooked(model, p) for p in item.module.parameters())
        encloses = ran.direct_only if hooked else item.direct_only  # FSDP2's root may move
        comes_with = dict[int, None]()
        if trained and frozen:
            number = len(units)
            owner.update((p, number) for _, _, p in frozen)
            chunks, weight_bytes, _ = _layout(frozen, groups, dtype, granule, whole)
            units.append(
                Unit(number, f"{ran.name} {FROZEN}", chunks, (), encloses, weight_bytes,
                     0, runs=False)
            )  # fmt: skip
            of_units.append(ran)
            comes_with[number] = None
        number, own = len(units), trained or frozen
        owner.update((p, number) for _, _, p in own)
        comes_with.update((owner[p], None) for p in shared if owner[p] != number)
        chunks, weight_bytes, grad_bytes = _layout(own, groups, dtype, granule, whole)
        flows = flows or bool(trained)
        flops, kept = forward_flops(ran) // divided, activation_bytes(ran, dtype)
        back = backward_flops(ran, learns, flows=flows) // divided
        of_attention = attention(ran, dtype)
        logits = logits_bytes(ran, dtype) if item is found[-1] or ran.computes_with else 0
        given = input_bytes(ran, dtype)
        forward_only = bool(own) and all(p in beside for _, _, p in own)
        units.append(
            Unit(
                number, ran.name, chunks, tuple(comes_with), encloses, weight_bytes, grad_bytes,
                flops, 0 if forward_only else back, given if logits else kept, given,
                logits, of_attention[0] // divided, of_attention[1], forward_only=forward_only,
            )
        )  # fmt: skip
        of_units.append(ran)
    return Partition(
        _with_reached(units, of_units, owner),
        tuple(of_units),
        tuple(parameters),
        tuple(owner[p] for p in parameters),
        frozenset(range(len(units))) - {owner[p] for p in parameters if not is_hooked(model, p)},
        external,
    )


def _without_backward(model: nn.Module, trained: Container[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters of models that have nothing to train, beside others that have."""
    parameters = [set(each.parameters()) for each in entries(model).values()]
    trains = [any(p in trained for p in each) for each in parameters]
    used = set[nn.Parameter]().union(
        *(p for p, does in zip(parameters, trains, strict=True) if does)
    )
    return set[nn.Parameter]().union(*parameters) - used if used else set()


def _with_reached(
    units: Sequence[Unit], found: Sequence[FoundUnit], owner: Mapping[nn.Parameter, int]
) -> tuple[Unit, ...]:
    """Return the units, each sharing the weights of the units whose modules it appears to run.

    They share its weights too, unless several units run them.  If such units were onloaded one by
    one, the largest might find no contiguous room next to the others.  Only units that together are
    not larger are shared, because a function may refer to modules that it does not run.
    """
    reached: dict[int, set[int]] = {}
    for unit, item in zip(units, found, strict=True):
        if item.direct_only or not unit.runs:
            continue
        inside = set(item.module.modules())
        others = {
            owner[p]
            for module in reached_modules(item.module)
            if module not in inside and item.module not in module.modules()
            for p in module.parameters()
            if p in owner
        }
        others |= {i for other in others for i in units[other].shares}
        others -= {unit.index, *unit.shares}
        if sum(units[i].weight_bytes for i in others) <= unit.weight_bytes:
            reached[unit.index] = others
    shares = {unit.index: set(unit.shares) for unit in units}
    users = Counter(i for others in reached.values() for i in others)
    for index, others in reached.items():
        shares[index] |= others
        for other in others:
            if users[other] == 1:
                shares[other] |= others | {index, *units[index].shares}
    return tuple(
        replace(u, shares=(*u.shares, *sorted(shares[u.index] - {u.index, *u.shares})))
        for u in units
    )


def received_bytes(
    model: nn.Module, parts: Partition, dtype: torch.dtype | None
) -> tuple[tuple[int, int], ...]:
    """Return, by unit, the bytes that a rank receives from others in a forward and in a backward.

    Both gather the weights of a module, but FSDP2 keeps those of the root between them.  Backward
    also reduces gradients; it runs from the first unit with trained weights on.

    Args:
        dtype: of all weights; ``None``: each keeps its own.

    Returns:
        Empty if the rank has all weights.
    """
    if not isinstance(model, StandInModel) or model.ranks == 1:
        return ()
    count = len(parts.units)
    gathered, reduced, flows = [0] * count, [0] * count, False
    for p, unit, group in zip(parts.parameters, parts.unit_of, parts.groups, strict=True):
        while not parts.units[unit].runs:  # frozen weights of the next unit
            unit += 1
        nbytes = p.numel() * (model.ranks - 1) * (dtype or p.dtype).itemsize  # padded alike
        gathered[unit] += nbytes
        reduced[unit] += nbytes * (group is not None)
    found = list[tuple[int, int]]()
    for run, item in zip(parts.units, parts.found, strict=True):
        flows = flows or run.trainable
        kept = item.name == ROOT or run.forward_only
        again = gathered[run.index] if flows and not kept else 0
        found.append((gathered[run.index], again + reduced[run.index]))
    return tuple(found)


def pinned_units(model: nn.Module, parts: Partition, names: Sequence[str]) -> frozenset[int]:
    """Return the units that must stay on the device, and those of the named modules.

    See ``parameters_named``.
    """
    pinned = parameters_named(model, names) | staying(model)
    return frozenset(
        unit for p, unit in zip(parts.parameters, parts.unit_of, strict=True) if p in pinned
    )
