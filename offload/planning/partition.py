"""Cuts a model into units, and each unit into chunks: names, shapes and offsets, never data.

A unit is what moves together; a chunk is a unit's parameters of one dtype and parameter group,
flattened.  Every parameter starts on a 64-byte border (other offsets change matmul results in the
last bit) and every chunk on a 4096-byte one (direct I/O).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from ..schedule.units import PAGE, PARAM_ALIGN, Chunk, ParamSpec, Unit, align
from .sections import Section

LARGE_SHARE = 0.25  # a module this much of the model is cut further where it can be
ROOT = "(root)"  # the name of the unit of the model's own parameters
FROZEN = "(frozen)"  # behind the name of a unit whose other weights are trained

_Members = list[tuple[int, str, nn.Parameter]]  # of a unit: index, name, parameter


@dataclass(frozen=True)
class FoundUnit:
    """A unit as found in the module tree, before it has a layout."""

    name: str
    module: nn.Module
    direct_only: bool  # just the module's own parameters: its children are units of their own


@dataclass(frozen=True)
class Partition:
    """The whole model: its units, their modules, and the parameters in the order of their index.

    ``found`` is by unit: a unit that does not run has the module of the one that it comes with.
    """

    units: tuple[Unit, ...]
    found: tuple[FoundUnit, ...]
    parameters: tuple[nn.Parameter, ...]
    unit_of: tuple[int, ...]  # by parameter index

    @property
    def weight_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)

    @cached_property
    def groups(self) -> tuple[int | None, ...]:
        """By parameter index, the param group; ``None`` for one that is never updated."""
        found = {s.index: chunk.group for unit in self.units for chunk, s in unit.params}
        return tuple(found[index] for index in range(len(self.parameters)))

    @property
    def running(self) -> Iterator[tuple[int, FoundUnit]]:
        """The units that run, by number."""
        return ((u.index, f) for u, f in zip(self.units, self.found, strict=True) if u.runs)

    @cached_property
    def recomputable(self) -> frozenset[int]:
        """The units that are a module, called as a whole, with others after it: what the last one
        saves is needed at once."""
        last = len(self.units) - 1
        return frozenset(
            unit for unit, found in self.running if unit != last and not found.direct_only
        )


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_BAGS = (nn.ParameterList, nn.ParameterDict)


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _direct(module: nn.Module) -> bool:
    """Whether the module's own forward reads parameters that it (or a bag in it) holds."""
    if any(True for _ in module.parameters(recurse=False)):
        return True
    return any(isinstance(c, _BAGS) and _nbytes(c) > 0 for c in module.children())


def direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that the module holds itself, or in a bag: its own forward may read them."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, _BAGS):
            yield from direct_parameters(child)


def _like_members(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of a container that share their class with another one and hold parameters."""
    members = [(n, m) for n, m in container.named_children() if _nbytes(m) > 0]
    kinds = Counter(type(m) for _, m in members)
    return [(n, m) for n, m in members if kinds[type(m)] > 1]


def _has_blocks(module: nn.Module) -> bool:
    return any(isinstance(m, _CONTAINERS) and _like_members(m) for m in module.modules())


class _Finder:
    """Walks the module tree once; ``named`` modules are units whatever their kind."""

    def __init__(self, model: nn.Module, named: Mapping[nn.Module, str]) -> None:
        self.model, self.named = model, named
        self.limit = _nbytes(model) * LARGE_SHARE
        self.found: list[FoundUnit] = []
        self.seen: set[nn.Module] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        if module in self.seen or _nbytes(module) == 0 or isinstance(module, _BAGS):
            return
        self.seen.add(module)
        inner_named = any(m in self.named for m in module.modules() if m is not module)
        if module in self.named and not inner_named:
            self._add(name, module, False)
        elif inner_named or module is self.model or self._cut_further(module):
            if _direct(module):
                self._add(name, module, True)
            for child_name, child in module.named_children():
                self.visit(f"{name}.{child_name}" if name else child_name, child)
        else:
            self._add(name, module, False)

    def _cut_further(self, module: nn.Module) -> bool:
        if isinstance(module, _CONTAINERS):
            return True
        large = _nbytes(module) > self.limit
        if _has_blocks(module):
            return large or not self._is_block(module)
        heavy = [c for c in module.children() if _nbytes(c) > 0]
        return large and not _direct(module) and len(heavy) > 1 and not self._is_block(module)

    def _is_block(self, module: nn.Module) -> bool:
        return module in self._blocks

    @property
    def _blocks(self) -> set[nn.Module]:
        if not hasattr(self, "_block_set"):
            self._block_set = {
                member
                for m in self.model.modules()
                if isinstance(m, _CONTAINERS)
                for _, member in _like_members(m)
            }
        return self._block_set

    def _add(self, name: str, module: nn.Module, direct_only: bool) -> None:
        self.found.append(FoundUnit(name or ROOT, module, direct_only))


def find_units(model: nn.Module, names: Sequence[str] | None = None) -> list[FoundUnit]:
    """The units of ``model`` in the order of registration.

    Members of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that share their class are units
    (the outermost such, unless one is a quarter of the model and has like blocks inside); what is
    left becomes units of its own.  ``names`` are modules that form units whatever their kind, and
    so are sections of experts.

    Raises:
        ValueError: a name that is no module of the model, or a module without parameters.
    """
    modules = dict(model.named_modules())
    named: dict[nn.Module, str] = {m: n for n, m in modules.items() if isinstance(m, Section)}
    for name in names or ():
        if name not in modules:
            raise ValueError(f"units: the model has no module {name!r}")
        if _nbytes(modules[name]) == 0:
            raise ValueError(f"units: module {name!r} holds no parameters")
        named[modules[name]] = name
    finder = _Finder(model, named)
    finder.visit("", model)
    return finder.found


def unit_parameters(found: FoundUnit) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that the unit's forward reads, its own tied ones included."""
    module = found.module
    prefix = "" if found.name == ROOT else f"{found.name}."
    if not found.direct_only:
        for name, p in module.named_parameters(remove_duplicate=False):
            yield prefix + name, p
        return
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, p
    for child_name, child in module.named_children():
        if isinstance(child, _BAGS):
            for name, p in child.named_parameters(remove_duplicate=False):
                yield f"{prefix}{child_name}.{name}", p


class _Product(NamedTuple):
    """What a unit multiplies by: a matrix of ``inputs`` and ``outputs``, or several alike, of which
    a token comes to so many as ``rows`` says, about."""

    p: nn.Parameter
    inputs: int
    outputs: int
    rows: float = 1.0

    @property
    def flops(self) -> float:
        """Per token."""
        return 2 * self.inputs * self.outputs * self.rows


_KEPT_MORE = {
    "NewGELUActivation": 3, "AccurateGELUActivation": 3, "FastGELUActivation": 6,
    "QuickGELUActivation": 1,
}  # fmt: skip


def _products(found: FoundUnit) -> list[_Product]:
    """The products that a unit takes with its weights."""
    module = found.module
    if found.direct_only:
        return []
    if isinstance(module, Section):
        p = module.section
        return [_Product(p, p.shape[2], p.shape[1], module.rows_per_token)]
    return [
        _Product(p, math.prod(p.shape[1:]), p.shape[0])
        for inner in module.modules()
        if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag))
        for p in inner.parameters(recurse=False)
        if p.dim() > 1
    ]


def forward_flops(found: FoundUnit) -> int:
    """FLOPs of the unit's forward per token: two per element of each matrix it multiplies by.

    What takes no product with a weight (look-ups, norms, attention's scores) is not counted.
    """
    return round(sum(each.flops for each in _products(found)))


def backward_flops(found: FoundUnit, trained: Container[nn.Parameter], *, flows: bool) -> int:
    """FLOPs of its backward, per token: a product like forward's for the gradient of each matrix
    that is trained, and one to hand on the gradient, where it ``flows`` to what is before."""
    return round(sum(each.flops * (flows + (each.p in trained)) for each in _products(found)))


def activation_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Bytes per token that autograd keeps, about: what goes into and comes out of each matrix.

    What two of them share counts twice, norms and attention's own not at all; in transformers with
    fused attention the one makes up for the other.  Activation functions that are written out keep
    more tensors of the widest product's size than fused ones (counted in transformers 5).
    """
    products = _products(found)
    if not products:
        return 0
    widest = max(products, key=lambda each: each.outputs)
    more = sum(_KEPT_MORE.get(type(inner).__name__, 0) for inner in found.module.modules())
    kept = [(each, each.inputs + each.outputs) for each in products]
    kept.append((widest, widest.outputs * more))
    return round(sum(n * each.rows * (dtype or each.p.dtype).itemsize for each, n in kept))


def logits_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Bytes per token of what a head gives out, and of the loss over it: its fp32 logarithms."""
    head = found.module
    if not isinstance(head, nn.Linear) or head.out_features <= head.in_features:
        return 0
    return head.out_features * ((dtype or head.weight.dtype).itemsize + torch.float32.itemsize)


def input_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Bytes per token that go into the unit, about: what its first matrix takes."""
    for each in _products(found):
        return round(each.inputs * each.rows * (dtype or each.p.dtype).itemsize)
    return 0


def _dense_stride(p: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own stride where its memory is dense, else the contiguous one."""
    pairs = sorted((s, n) for s, n in zip(p.stride(), p.shape, strict=True) if n > 1)
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= size
    return p.stride()


def _layout(
    own: _Members,
    groups: Mapping[nn.Parameter, int],
    dtype: torch.dtype | None,
    granule: int,
) -> tuple[tuple[Chunk, ...], int, int]:
    """Chunks of one unit, trained ones first, with the bytes of its weight and gradient slots."""
    keyed: dict[tuple[torch.dtype, int | None], _Members] = {}
    for index, name, p in own:
        group = groups.get(p) if p.requires_grad else None
        keyed.setdefault((dtype or p.dtype, group), []).append((index, name, p))
    chunks: list[Chunk] = []
    byte_offset = grad_offset = 0
    for (kind, group), members in sorted(
        keyed.items(), key=lambda item: (item[0][1] is None, item[0][1] or 0, str(item[0][0]))
    ):
        specs: list[ParamSpec] = []
        offset = 0
        border = max(PARAM_ALIGN // kind.itemsize, granule)
        for index, name, p in members:
            specs.append(
                ParamSpec(index, name, tuple(p.shape), _dense_stride(p), p.numel(), offset)
            )
            offset += align(max(p.numel(), 1), border)
        chunk = Chunk(kind, group, offset, byte_offset, grad_offset, tuple(specs))
        chunks.append(chunk)
        byte_offset += align(chunk.nbytes, PAGE)
        if group is not None:
            grad_offset += align(chunk.nbytes, PAGE)
    return tuple(chunks), byte_offset, grad_offset


def _members(
    item: FoundUnit, all_trained: Container[nn.Parameter], owner: Container[nn.Parameter],
    parameters: list[nn.Parameter],
) -> tuple[_Members, _Members, list[nn.Parameter]]:  # fmt: skip
    """The parameters that a unit is the first to read, trained and frozen, which join
    ``parameters``; and those that have an ``owner``, or come once more."""
    trained, frozen, shared = _Members(), _Members(), list[nn.Parameter]()
    seen = set[nn.Parameter]()
    for name, p in unit_parameters(item):
        if not p.is_floating_point():
            continue
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
) -> Partition:
    """Cuts ``model`` into units and lays out their slots.

    Args:
        groups: the param-group index of every parameter that the optimizer holds.
        names: modules that form units, else they are found.
        dtype: dtype of all floating-point weights, else each keeps its own.
        granule: parameters start at multiples of so many elements (a power of two), because the
            optimizer's state cannot be cut elsewhere.

    Integer parameters are left alone.  A parameter that several units read belongs to the first.
    What is frozen in a unit with trained parameters is a unit of its own before it, which comes
    with it: such weights never change, and are moved and stored alone.
    """
    owner: dict[nn.Parameter, int] = {}
    parameters: list[nn.Parameter] = []
    units: list[Unit] = []
    of_units: list[FoundUnit] = []
    found = find_units(model, names)
    all_trained = {p for p in model.parameters() if p.requires_grad and p in groups}
    flows = False
    for item in found:
        trained, frozen, shared = _members(item, all_trained, owner, parameters)
        comes_with = dict[int, None]()
        if trained and frozen:
            number = len(units)
            owner.update((p, number) for _, _, p in frozen)
            chunks, weight_bytes, _ = _layout(frozen, groups, dtype, granule)
            units.append(
                Unit(number, f"{item.name} {FROZEN}", chunks, (), item.direct_only, weight_bytes,
                     0, runs=False)
            )  # fmt: skip
            of_units.append(item)
            comes_with[number] = None
        number, own = len(units), trained or frozen
        owner.update((p, number) for _, _, p in own)
        comes_with.update((owner[p], None) for p in shared if owner[p] != number)
        chunks, weight_bytes, grad_bytes = _layout(own, groups, dtype, granule)
        flows = flows or bool(trained)
        flops, kept = forward_flops(item), activation_bytes(item, dtype)
        back = backward_flops(item, all_trained, flows=flows)
        logits = logits_bytes(item, dtype) if item is found[-1] else 0
        given = input_bytes(item, dtype)
        units.append(
            Unit(
                number,
                item.name,
                chunks,
                tuple(comes_with),
                item.direct_only,
                weight_bytes,
                grad_bytes,
                flops,
                back,
                given if logits else kept,
                given,
                logits,
            )
        )
        of_units.append(item)
    return Partition(
        tuple(units), tuple(of_units), tuple(parameters), tuple(owner[p] for p in parameters)
    )


def pinned_units(model: nn.Module, parts: Partition, names: Sequence[str]) -> frozenset[int]:
    """The units that hold the parameters of these modules.

    Raises:
        ValueError: there is no such module, or it holds no parameters.
    """
    modules = dict(model.named_modules())
    index_of = {id(p): index for index, p in enumerate(parts.parameters)}
    pinned: set[int] = set()
    for name in names:
        if name not in modules:
            raise ValueError(f"resident: the model has no module {name!r}")
        held = {parts.unit_of[index_of[id(p)]] for p in modules[name].parameters()
                if id(p) in index_of}  # fmt: skip
        if not held:
            raise ValueError(f"resident: module {name!r} holds no parameters")
        pinned |= held
    return frozenset(pinned)
