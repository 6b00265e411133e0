"""The baseline of CI's benchmark is of the arms that it runs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.arms import parameters
from benchmarks.machine import ROOT
from benchmarks.step import QUICK, arms


def test_the_baseline_has_the_arms_of_the_quick_suite(tmp_path: Path) -> None:
    """Else a renamed arm would be missing in every run, or guarded by none."""
    kept = json.loads((ROOT / "benchmarks" / "baseline.json").read_text(encoding="utf-8"))
    (comparison,) = kept["comparisons"]
    assert f"{parameters(QUICK.shape) / 1e6:.0f} M parameters" in comparison["title"]
    names = [row["name"] for row in comparison["rows"]]
    assert names == [arm.name for arm in arms(QUICK, tmp_path, "cpu")]
    assert all(row["ratio"] for row in comparison["rows"])
