"""One door to the residency machine, one to the engine, and mutants that are still there."""

from __future__ import annotations

import ast

from tests.device.mutants import MUTANTS

from .sources import ROOT, Source, package_sources

OWNERS = {"overspill.movement.executor", "overspill.planning.simulate"}
DOORS = {"handle", "occupied", "saved_bytes", "used_bytes"}  # all but the first only read


def entered(source: Source) -> set[str]:
    """What a file asks for of a machine that it has, or of one that somebody else has."""
    return {
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in ("machine", "_machine")
    }


def test_the_machine_has_one_door() -> None:
    seen = set[str]()
    for source in package_sources():
        if source.module.startswith("overspill.schedule"):
            continue
        names = {name for found in source.imports for name in found.names}
        if source.module in OWNERS:
            assert "Residency" in names
            seen |= entered(source)
        else:
            assert "Residency" not in names, f"{source.path} has a machine of its own"
            assert not entered(source), f"{source.path} reaches into the machine"
    assert seen == DOORS


def test_other_doors_are_found() -> None:
    source = Source("made_up.py")
    source.__dict__["text"] = "self.executor.machine.weights.drop(0)"
    assert entered(source) == {"weights"}


def reached_through(source: Source) -> set[str]:
    """Parts of an engine's parts that a file asks for: ``engine.part.part``."""
    return {
        f"{node.value.attr}.{node.attr}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and getattr(node.value.value, "attr", getattr(node.value.value, "id", ""))
        in ("engine", "_engine")
    }


def test_nobody_reaches_through_the_engine() -> None:
    users = 0
    for source in package_sources():
        if not source.module.startswith(("overspill.io_engine", "overspill.movement.store")):
            assert not reached_through(source), source.path
            users += any("Engine" in found.names for found in source.imports)
    assert users >= 2


def test_who_reaches_through_it_is_found() -> None:
    source = Source("made_up.py")
    source.__dict__["text"] = "self._engine.weights.reconcile(); engine.step(); engine.plan"
    assert reached_through(source) == {"weights.reconcile"}


def test_the_engine_is_made_at_once() -> None:
    """Nothing is set in one after it was made, and it has few things of its own."""
    source = next(s for s in package_sources() if s.module == "overspill.engine")
    found = next(
        node for node in source.tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Engine"
    )  # fmt: skip
    set_in: dict[str, set[str]] = {}
    for method in found.body:
        for node in ast.walk(method):
            mine = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            if mine and isinstance(node.ctx, ast.Store):
                set_in.setdefault(getattr(method, "name", ""), set()).add(node.attr)
    assert set_in.keys() == {"__init__"}
    assert len(set_in["__init__"]) <= 13


def test_every_mutant_still_has_its_line() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "offload" / mutant.file).read_text(encoding="utf-8")
        assert mutant.applied(text) != text
