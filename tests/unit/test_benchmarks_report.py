"""Reports gather what suites wrote; the guard finds what became worse, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, report
from benchmarks.machine import facts
from benchmarks.results import Comparison, Outcome
from benchmarks.runner import Row, Sample


def test_a_page_has_every_table_and_sample(tmp_path: Path) -> None:
    row = Row("plain", {}, (Sample(1.25),), median_s=1.25)
    made = Outcome("step", [Comparison("Title", {}, [row])], facts(tmp_path), at="2026-01-02T03")
    made.save(tmp_path / "in")
    (tmp_path / "in" / "step.png").write_bytes(b"picture")
    (tmp_path / "in" / "other.json").write_text("{}")
    page = report.write(tmp_path / "in", tmp_path / "out")
    assert page.name == "2026-01-02.md"
    text = page.read_text()
    assert "### Title" in text and "1.25 s" in text and "2026-01-02-step.png" in text
    assert (tmp_path / "out" / "2026-01-02-step.json").exists()
    assert "other.json" not in text


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results"):
        report.write(tmp_path, tmp_path / "out")


def result(**rows: tuple[float | None, str | None]) -> dict[str, Any]:
    made = [{"name": n, "ratio": ratio, "error": error} for n, (ratio, error) in rows.items()]
    return {"comparisons": [{"title": "T", "rows": made}]}


def test_the_guard_finds_what_is_worse() -> None:
    old = result(a=(1.0, None), b=(1.0, None), c=(2.0, None), d=(1.0, None), e=(None, "no"))
    new = result(a=(1.4, None), b=(1.6, None), d=(None, "broke"), e=(None, "no"))
    assert compare.regressions(old, new, 1.5) == [
        "T / b: ratio 1.00 before, 1.60 now",
        "T / c: is missing",
        "T / d: broke",
    ]
    assert compare.regressions(old, old, 1.5) == []
