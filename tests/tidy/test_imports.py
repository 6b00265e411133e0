"""Imports run one way, from the surface down, and never in a circle."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .sources import Source, inner_imports, package_sources

# From the top down.  A part may import parts of a lower level, and files of its own part.
LEVELS = [
    {"overspill.__main__"},
    {"overspill.cli"},
    {"overspill.train", "overspill.doctor"},
    {"overspill"},  # the public names
    {"overspill.integrations"},
    {"overspill.api"},
    {"overspill.arguments", "overspill.over_ranks"},
    {"overspill.ranks"},
    {"overspill.wrapping", "overspill.joint_steps"},
    {"overspill.optimizer"},
    {"overspill.engine_handle"},
    {"overspill.plans"},
    {"overspill.blueprints"},
    {"overspill.checks", "overspill.open_engines"},
    {"overspill.engine"},
    {"overspill.loop", "overspill.closeable", "overspill.holders", "overspill.model_marks"},
    {"overspill.durable"},
    {"overspill.state"},
    {"overspill.step"},
    {"overspill.grads"},
    {"overspill.activations"},
    {"overspill.logits"},
    {"overspill.params"},
    {"overspill.private"},
    {"overspill.movement"},
    {"overspill.planning"},
    {"overspill.config"},
    {"overspill.measure", "overspill.observe"},
    {"overspill.quantised"},
    {"overspill.errors", "overspill.paths"},
    {"overspill.io_engine", "overspill.optim"},
    {"overspill.schedule"},
    {"overspill.facts"},
]
# What each of these may import, directly and through others, besides itself.
CLOSED = {
    "overspill.facts": set[str](),
    "overspill.schedule": {"overspill.facts"},
    "overspill.io_engine": set[str](),
    "overspill.optim": set[str](),
}
PURE = "overspill.schedule"
IMPURE = {
    "asyncio", "concurrent", "io", "multiprocessing", "os", "pathlib", "queue", "random", "socket",
    "subprocess", "tempfile", "threading", "time", "numpy", "overspill.io_engine",
}  # fmt: skip


def part_of(module: str) -> str:
    """The entry of ``LEVELS`` that a module belongs to: the longest that it starts with."""
    known = [part for level in LEVELS for part in level]
    inside = [part for part in known if module == part or module.startswith(part + ".")]
    inside = [part for part in inside if part != "overspill" or module == "overspill"]
    assert inside, f"{module} is in no room of the house; say in LEVELS where it belongs"
    return max(inside, key=len)


def level_of(module: str) -> int:
    part = part_of(module)
    return next(index for index, level in enumerate(LEVELS) if part in level)


def test_every_module_has_a_level() -> None:
    sources = package_sources()
    assert len(sources) > 30
    for source in sources:
        level_of(source.module)


def test_imports_run_downward() -> None:
    upward = []
    for module, targets in inner_imports(package_sources()).items():
        for target, line in targets.items():
            same_part = part_of(module) == part_of(target)
            if not same_part and level_of(target) <= level_of(module):
                upward.append(f"{module}:{line} imports {target}")
    assert not upward, "\n".join(["imports that run upward or sideways:", *upward])


def reachable(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    """Every module that ``start`` imports, directly or through others."""
    found: set[str] = set()
    ahead = list(graph.get(start, ()))
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead.extend(graph.get(module, ()))
    return found


def circles(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Groups of modules each of which imports, through some chain, all others of its group."""
    reach = {module: reachable(graph, module) for module in graph}
    groups = {
        frozenset({module} | {other for other in reach[module] if module in reach[other]})
        for module in graph
        if module in reach[module]
    }
    return sorted(", ".join(sorted(group)) for group in groups)


def test_imports_make_no_circle() -> None:
    found = circles(inner_imports(package_sources()))
    assert not found, "\n".join(["modules that import each other:", *found])


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a", "e"], "e": ["f"]}) == ["a, b, c"]
    assert circles({"a": ["b"], "b": ["c"]}) == []


def test_own_packages_are_imported_relatively() -> None:
    bare = [
        f"{source.path}:{found.line} imports {found.module}"
        for source in package_sources()
        for found in source.imports
        if not found.relative
        and found.module.split(".")[0] in ("offload", "optim", "io_engine", "overspill")
    ]
    assert not bare, "\n".join(["write these with dots:", *bare])


def test_closures_stay_closed() -> None:
    """What a folder may not import, it does not import through others either."""
    graph = inner_imports(package_sources())
    strangers = [
        f"{module} comes to {found}"
        for room, allowed in CLOSED.items()
        for module in graph
        if part_of(module) == room
        for found in reachable(graph, module)
        if part_of(found) not in {room, *allowed}
    ]
    assert not strangers, "\n".join(["what should be a leaf is none:", *sorted(strangers)])


def test_schedule_is_pure() -> None:
    impure = []
    for source in package_sources():
        if source.module.startswith(PURE):
            for found in source.imports:
                top = found.module.split(".")[0]
                if top in IMPURE or found.module in IMPURE:
                    impure.append(f"{source.path}:{found.line} imports {found.module}")
    assert not impure, "\n".join(["no device, I/O, threads or clock in schedule:", *impure])


def test_relative_imports_are_resolved() -> None:
    """The reading itself: dots, ``__init__`` files and imported modules."""
    source = Source("offload/movement/accelerators/sim.py")
    assert source.module == "overspill.movement.accelerators.sim"
    graph = inner_imports(package_sources())
    assert "overspill.errors" in graph[source.module]
    assert "overspill.movement.accelerators.base" in graph[source.module]
    assert "overspill.measure.probes" in graph["overspill.measure.machine_rates"]
    assert Source("optim/__init__.py").package == "overspill.optim"
