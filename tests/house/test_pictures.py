"""The script that draws the pictures of the pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.devices import about_cpu
from tests.remedies.table import net, step, wrapped
from tests.tidy.sources import ROOT


@about_cpu
def test_all_pictures_of_the_pages_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        step(model, optimizer, 1)
        optimizer.trace(tmp_path / "trace.json")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path, tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {"how-it-works.png", "kill.png", "timeline.png", "memory.png"}
    assert all((ROOT / "docs" / name).exists() for name in drawn)
