"""One door to the residency machine, and mutants that are still there."""

from __future__ import annotations

import ast

from tests.device.mutants import MUTANTS

from .sources import ROOT, Source, package_sources

OWNERS = {"overspill.movement.executor", "overspill.planning.simulate"}
DOORS = {"handle", "used_bytes"}  # the second is a figure for the trace


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


def test_every_mutant_still_has_its_line() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "offload" / mutant.file).read_text(encoding="utf-8")
        assert mutant.applied(text) != text
