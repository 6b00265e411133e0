"""A new elementwise rule: its own file and a line in ``optim/__init__.py``, and where it has a
native kernel, ``csrc/cpu/rules.h``."""

from __future__ import annotations

import re

import pytest

from overspill.optim.registry import MEASURED

from .sources import ROOT, package_sources

PYTHON, NATIVE = 2, 1
# What measures rules names some of them; a state from elsewhere is told by its moments.
CHOOSERS = {"optim/bench.py", "offload/durable/resume.py"}


@pytest.mark.parametrize("rule", ["lion", "adagrad", "momentum"])
def test_few_places_know_a_rule(rule: str) -> None:
    assert rule in MEASURED
    code = re.compile(rf'"{rule}"|\b{rule.capitalize()}(Rule)?\b')
    python = {source.path for source in package_sources() if code.search(source.text)} - CHOOSERS
    native = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cpp", ".cu", ".cuh") and code.search(path.read_text())
    }
    assert 1 <= len(python) <= PYTHON, python
    assert len(native) == NATIVE, native
