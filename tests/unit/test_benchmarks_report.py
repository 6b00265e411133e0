"""Reports gather what suites wrote; the guard finds what became worse, and only that."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arms, compare, gpu, report
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


def test_the_gpu_run_comes_to_its_end_on_sim(tmp_path: Path) -> None:
    gpu.run_steps("sim", tmp_path, time.monotonic() + 50)
    (made,) = json.loads((tmp_path / "gpu.json").read_text())["comparisons"]
    assert [row["error"] for row in made["rows"]] == [None] * 4
    assert len({row["samples"][-1]["seen"]["loss"] for row in made["rows"][1:]}) == 1


def test_an_arm_without_time_left_is_a_row_that_says_so() -> None:
    plan = arms.Plan(gpu.TINY, "bf16", rounds=1, steps=1, warmup=2)
    row = gpu.alone(arms.Worker("late", plan, "cpu", None), 1, time.monotonic())
    assert row.error == "not run: the time was up"
    row = gpu.alone(arms.Worker("cut", plan, "cpu", None), 1, time.monotonic() + 0.5)
    assert row.error is not None and "the time was up" in row.error
