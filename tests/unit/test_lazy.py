"""Names of ``overspill`` are imported when asked for; the command answers without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import overspill


def ran(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_the_names_are_those_that_types_are_checked_by() -> None:
    assert overspill.__file__ is not None
    tree = ast.parse(Path(overspill.__file__).read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If)]
    checked: dict[str | None, tuple[str, ...]] = {}
    for each in ast.walk(blocks[0]):
        if isinstance(each, ast.ImportFrom):
            names = tuple(alias.name for alias in each.names)
            checked[each.module] = checked.get(each.module, ()) + names
    assert checked.pop(None) == overspill._MODULES
    assert checked == overspill._FROM
    assert sorted(overspill.__all__) == sorted(n for names in checked.values() for n in names)


def test_every_name_is_there() -> None:
    for name in overspill.__all__:
        assert getattr(overspill, name).__module__.startswith("overspill")
        assert name in dir(overspill)
    with pytest.raises(AttributeError, match="no attribute 'warp'"):
        overspill.warp  # noqa: B018


@pytest.mark.parametrize("name", ["optim.AdamW", "io_engine.IoEngine", "errors.BudgetError"])
def test_its_modules_are_there(name: str) -> None:
    """In a process where nobody has imported them before."""
    assert ran(f"import overspill; print(overspill.{name}.__name__)") == name.split(".")[1]


def test_nothing_waits_for_torch_that_does_not_use_it() -> None:
    assert ran("import overspill.cli.app, sys; print('torch' in sys.modules)") == "False"
    inspects = "import overspill.durable.inspect, overspill.durable.sums, sys"
    assert ran(f"{inspects}; print('torch' in sys.modules)") == "False"
    assert ran("from overspill import *; print(wrap.__module__)") == "overspill.api"
