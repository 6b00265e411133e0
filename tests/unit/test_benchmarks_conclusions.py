"""Conclusions: what a reader is told is what was measured, also where another is ahead."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.conclusions import (
    HEADLINE,
    RESULTS,
    ahead,
    conclusions,
    headline,
    peers_together,
    put,
    table,
)
from benchmarks.machine import ROOT


def row(name: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    samples = [{"seconds": seconds, "seen": {"loss": 9.25}}] if seconds else []
    ratio = dict.fromkeys(("ratio", "ratio_low", "ratio_high"), seconds)
    return {
        "name": name, "facts": {}, "samples": samples, "error": None, "median_s": seconds,
        **ratio, **more,
    }  # fmt: skip


def comparison(*rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"title": "T", "settings": settings, "rows": list(rows)}


def test_who_is_faster_than_ours_is_named() -> None:
    """Where a peer wins, it says so."""
    rows = [row("torch", 1.0), row("overspill, a", 2.0), row("overspill, b", 4.0), row("x", 3.0)]
    assert ahead(rows) == "Faster than the best of overspill: torch (0.50 of it)."
    assert ahead(rows[1:]) == ""
    bound = row("bound", 0.1, facts={"sweep": True})
    assert ahead([bound, rows[1]]) == ""
    lean = [
        row(n, 1.0, facts={"bytes_per_parameter": b}) for n, b in (("torch", 8), ("overspill", 16))
    ]
    assert ahead(lean) == "Leaner than the best of overspill: torch (0.50 of it)."


def test_a_table_has_the_losses_and_the_errors() -> None:
    text = table(comparison(row("torch", 1.0), row("broken", None, error="no GPU\nhere")))
    assert "| torch | 1.00 s | 1.00 (1.00-1.00) | 9.2500 | - |" in text
    assert "| broken | - | - | - | no GPU |" in text
    assert table(comparison(row("nothing", None))) == ""


def test_of_many_settings_the_best_of_each_engine_is_shown() -> None:
    rows = [row(f"fio {n}", 2.0 + n) for n in range(8)] + [row("overspill uring", 2.5)]
    text = table(comparison(*rows, moved_bytes=10**9))
    assert "fio 0" in text and "fio 1" not in text and "0.500 GB/s" in text
    assert "Faster than the best of overspill: fio 0 (0.80 of it)." in text


def test_peers_that_ran_one_by_one_come_into_one_table() -> None:
    def beside(peer: dict[str, Any]) -> dict[str, Any]:
        ours = [row("overspill, here", 1.5), row("overspill, there", 1.25)]
        return {**comparison(row("torch", 1.0), *ours, peer), "title": f"T; {peer['name']}"}

    absent = comparison(row("absent", None, error="no GPU"))
    each = [beside(row("slow", 3.0)), beside(row("fast", 1.0)), absent]
    (together,) = peers_together(each)
    text = table(together)
    assert "**T, each peer beside torch in memory**" in text
    assert "| slow | 3.00 s | 3.00 (3.00-3.00) | 1.25 (there) | 9.2500 | - |" in text
    assert "| absent | - | - | - | - | no GPU |" in text
    assert "Faster than overspill beside it: fast (0.80 of it)." in text


def test_the_newest_reports_go_between_the_marks(tmp_path: Path) -> None:
    for day, name in (("2026-01-01", "old"), ("2026-01-02", "new")):
        machine = {"processor": "P", "cores": 2, "commit": "c"}
        result = {"comparisons": [comparison(row(name, 1.0))], "machine": machine}
        (tmp_path / f"{day}-step.json").write_text(json.dumps(result))
    page = tmp_path / "README.md"
    page.write_text(f"before\n{RESULTS[0]}\nstale\n{RESULTS[1]}\nafter\n")
    put(page, RESULTS, conclusions(tmp_path, "there"))
    text = page.read_text()
    assert "| new |" in text and "old" not in text and "stale" not in text
    assert "there/2026-01-02-step.json" in text
    assert text.startswith("before") and text.endswith("after\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for results"):
        put(page, RESULTS, "x")


@pytest.mark.parametrize(
    ("page", "marks", "made"),
    [("benchmarks/RESULTS.md", RESULTS, conclusions), ("README.md", HEADLINE, headline)],
)
def test_pages_say_what_the_reports_say(
    page: str, marks: tuple[str, str], made: Callable[[Path, str], str]
) -> None:
    """Generated, so that they can't drift: python -m benchmarks report --pages."""
    text = (ROOT / page).read_text(encoding="utf-8")
    reports = ROOT / "benchmarks" / "reports"
    told = made(reports, reports.relative_to((ROOT / page).parent).as_posix())
    assert text.partition(marks[0])[2].partition(marks[1])[0].strip() == told.strip() != ""


def test_the_guard_keeps_ratios_and_holds_later_ones_to_them(tmp_path: Path) -> None:
    """``python -m benchmarks compare OLD NEW``."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    new.write_text(json.dumps({"comparisons": [comparison(row("a", 1.0), row("b", 2.0))]}))
    words = [sys.executable, "-m", "benchmarks", "compare", str(old), str(new)]
    assert subprocess.run([*words, "--keep"], cwd=ROOT, check=False).returncode == 0
    assert "samples" not in old.read_text()
    assert compare.main([str(old), str(new)]) == 0
    new.write_text(json.dumps({"comparisons": [comparison(row("a", 1.0), row("b", 7.0))]}))
    assert compare.main([str(old), str(new)]) == 1
    assert compare.main([str(old), str(new), "--margin", "4"]) == 0
