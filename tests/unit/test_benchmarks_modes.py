"""The suite of modes: which tables there are, and what a row is held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import modes
from benchmarks.arms import GIB, Plan
from benchmarks.runner import Row, Sample


def test_every_choice_has_its_table() -> None:
    every = modes.cases(quick=False)
    assert len(every) == len(set(every)) == 2 * 2 * 3 * 2
    assert {case.shape.tokens_per_step for case in every} == {512, 2048}
    assert {case.host / GIB for case in every} == {0.5, 1, 2}
    assert {(case.durable, case.moments) for case in every} == {
        (True, "fp32"), (True, "int8"), (False, "fp32"), (False, "int8"),
    }  # fmt: skip
    first = every[0]
    assert (first.durable, first.moments, first.host) == (True, "fp32", GIB)
    assert "512 tokens" in first.title and "1 GiB" in first.title


def test_the_default_is_held_to_torch_and_to_its_bound() -> None:
    case = modes.cases(quick=False)[0]
    plan = Plan(case.shape, "bf16", 1, 1, 1)
    told = dict(modes.columns(case, plan))
    seen = {"plan_bound_s": 1.0, "loss": 1.0}
    row = Row("next_forward", {}, (Sample(1.2, seen),), median_s=1.2, ratio=1.2)
    assert told["goal"](row) == "at most 1.1 of its bound: MISSED; at most 1.25 of torch: holds"
    other = Row("backward", {}, (Sample(1.2, seen),), median_s=1.2, ratio=1.2)
    assert told["goal"](other) == "-" and told["over plan's bound"](other) == "1.20"


def test_an_unknown_table_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no table 9; there are 0 to 3"):
        modes.run(quick=True, folder=tmp_path, only=[9])


def test_a_small_table_is_measured(tmp_path: Path) -> None:
    outcome = modes.run(quick=True, folder=tmp_path, only=[0])
    (table,) = outcome.comparisons
    assert not outcome.failed, outcome.text()
    torch, *ours = table.rows
    assert [row.name for row in ours] == [*modes.MODES]
    assert 0 < torch.samples[0].seen["optimizer_s"] < torch.samples[0].seconds
    for row in ours:
        over = modes.over_bound(row)
        assert over is not None and over > 0.5, "a bound is one"
        assert row.samples[0].seen["read_bytes"] > 0
    assert not list(tmp_path.glob("store-*")), "its stores are gone"
