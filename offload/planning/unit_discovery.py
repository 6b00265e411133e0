"""Discovery of the units of a model in its module tree: similar blocks, and large modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .sections import Section

LARGE_SHARE = 0.25  # a module with a larger share of the model is divided further if possible
ROOT = "(root)"  # name of the unit with the model's own parameters


@dataclass(frozen=True)
class FoundUnit:
    """A unit as found in the module tree, before it has a layout."""

    name: str
    module: nn.Module
    direct_only: bool  # only the module's own parameters; its children are separate units
    # Of a ``direct_only`` unit: the parameters with which it computes products, if they are known.
    computes_with: frozenset[nn.Parameter] = frozenset()


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_BAGS = (nn.ParameterList, nn.ParameterDict)
# Their forward passes the parameters of their children to fused kernels, or checks their class
# (``has_torch_function``) to choose an algorithm, without calling the children.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _direct(module: nn.Module) -> bool:
    """Return whether the module itself, or a parameter list or dict in it, has parameters."""
    if any(True for _ in module.parameters(recurse=False)):
        return True
    return any(isinstance(c, _BAGS) and _holds(c) for c in module.children())


def direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the module has itself or in parameter lists and dicts.

    Its own forward may read them.
    """
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, _BAGS):
            yield from direct_parameters(child)


def _like_members(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the members of a container that have parameters and the same class as another one."""
    members = [(n, m) for n, m in container.named_children() if _nbytes(m) > 0]
    kinds = Counter(type(m) for _, m in members)
    return [(n, m) for n, m in members if kinds[type(m)] > 1]


def _has_blocks(module: nn.Module) -> bool:
    return any(isinstance(m, _CONTAINERS) and _like_members(m) for m in module.modules())


class _Finder:
    """A search that visits the module tree once; ``named`` modules of any kind are units."""

    def __init__(self, model: nn.Module, named: Mapping[nn.Module, str]) -> None:
        self.model, self.named = model, named
        self.limit = _nbytes(model) * LARGE_SHARE
        self.found: list[FoundUnit] = []
        self.seen: set[nn.Module] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        if module in self.seen or not _holds(module) or isinstance(module, _BAGS):
            return
        self.seen.add(module)
        inner_named = any(m in self.named for m in module.modules() if m is not module)
        if module in self.named and not inner_named:
            self._add(name, module, False)
        elif inner_named or (
            (module is self.model or self._cut_further(module)) and not isinstance(module, _WHOLE)
        ):
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


def modules_named(model: nn.Module, names: Iterable[str], option: str) -> dict[str, nn.Module]:
    """Return modules by name.

    Args:
        names: full names, or patterns, in which ``*`` stands for one part of a name, as in
            ``"layers.*.mlp"``.  Matches without parameters do not count.
        option: the option that has the names, for errors.

    Raises:
        ValueError: a name or pattern matches no module with parameters.
    """
    modules, found = dict(model.named_modules()), dict[str, nn.Module]()
    for name in names:
        parts = name.split(".")
        matching = [name] if name in modules else [
            each for each in modules
            if "*" in name and each.count(".") == len(parts) - 1
            and all(map(fnmatchcase, each.split("."), parts))
        ]  # fmt: skip
        if not matching:
            raise ValueError(f"{option}: the model has no module {name!r}")
        holding = {each: modules[each] for each in matching if _holds(modules[each])}
        if not holding:
            raise ValueError(f"{option}: module {name!r} holds no parameters")
        found.update(holding)
    return found


def find_units(model: nn.Module, names: Sequence[str] | None = None) -> list[FoundUnit]:
    """Return the units of ``model`` in the order of registration.

    Members of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that share their class are units.
    Of nested ones, the outermost are units, unless one has more than a quarter of the model and
    contains such members.  The remaining modules with parameters become separate units.

    Args:
        names: modules of any kind that form units, in addition to sections of experts; see
            ``modules_named``.

    Raises:
        ValueError: a name is not a module of the model, a module has no parameters, or a module is
            inside one whose forward reads its children's parameters directly.
    """
    modules = dict(model.named_modules())
    named: dict[nn.Module, str] = {m: n for n, m in modules.items() if isinstance(m, Section)}
    named.update({m: n for n, m in modules_named(model, names or (), "units").items()})
    _refuse_parts(modules, named.values())
    finder = _Finder(model, named)
    finder.visit("", model)
    return finder.found


def _refuse_parts(modules: Mapping[str, nn.Module], named: Iterable[str]) -> None:
    for outer, module in modules.items():
        inside = [n for n in named if outer != n and n.startswith(f"{outer}." if outer else "")]
        if isinstance(module, _WHOLE) and inside:
            whole = outer or "the model"
            raise ValueError(
                f"units: {inside[0]!r} cannot be a unit of its own: {whole} is an "
                f"nn.{type(module).__name__}, whose forward reads the parameters of its parts "
                f"without calling them; name {whole} instead, or leave units out"
            )


def units_to_shard(model: nn.Module, names: Sequence[str] | None = None) -> list[FoundUnit]:
    """Return the units on which ``fully_shard`` is to be called, before the model itself.

    These are blocks, embeddings and named units, unless they share a parameter with other modules.
    The rest is gathered with the model: FSDP2 keeps it from forward to backward, when a loss that
    is computed in chunks uses the head.
    """
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))

    def alone(module: nn.Module) -> bool:
        own = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        return all(shared[key] == count for key, count in own.items())

    return [
        each for each in find_units(model, names)
        if not each.direct_only and alone(each.module)
        and (each.name.rpartition(".")[2].isdigit() or each.name in (names or ())
             or isinstance(each.module, nn.Embedding))
    ]  # fmt: skip


def read_ahead(module: nn.Module) -> nn.Module | None:
    """Return the child whose parameters ``module.forward`` inspects before it calls the child.

    ``nn.TransformerEncoder`` chooses its algorithm by the class, device and ``requires_grad`` of
    the parameters of its first layer.
    """
    if isinstance(module, nn.TransformerEncoder) and len(module.layers):
        first: nn.Module = module.layers[0]
        return first
    return None


def unit_parameters(found: FoundUnit) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters that the unit's forward reads, also tied ones within it."""
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
