"""The optimizer suite: ratios round by round, goals, and every arm on a small buffer."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import optim as suite
from benchmarks import process
from benchmarks.optim import DEEPSPEED, FP32, INT8, SWEEP, TORCH, DeepSpeed, goals
from benchmarks.results import outcome
from benchmarks.runner import Row, Sample


def row(name: str, nbytes: float, *seconds: float) -> Row:
    facts = {"bytes": nbytes}
    return Row(name, facts, tuple(Sample(s) for s in seconds), median_s=sorted(seconds)[1])


def test_goals_and_shares() -> None:
    rows = {
        r.name: r
        for r in (
            row(TORCH, 48, 10.0, 20.0, 30.0),
            row(DEEPSPEED, 48, 5.0, 5.0, 5.0),
            row(SWEEP, 8, 0.8, 0.8, 0.8),
            row(FP32, 26, 4.0, 8.0, 3.0),
            row(INT8, 14, 2.0, 4.0, 2.4),
        )
    }
    assert suite.over(rows[FP32], rows[TORCH]) == 0.4
    assert suite.over(rows[FP32], None) is None
    assert suite.bound_share(rows[FP32], rows[SWEEP]) == pytest.approx(2.6 / 4)
    told = goals(rows[FP32], rows)
    assert "0.40 of torch, met" in told
    assert "0.80 of DeepSpeedCPUAdam, over 0.45" in told
    assert "bound under 0.9" in told
    assert goals(rows[INT8], rows) == "0.50 of fp32, met"


def test_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_PEERS", str(tmp_path))
    grad = torch.randn(1000).bfloat16()
    found = suite._compare("small", 1000, suite._arms(1000, grad), 2)
    errors = [r for r in found.rows if r.error]
    assert [r.name for r in errors] == [DEEPSPEED]
    assert "python -m benchmarks.peers install deepspeed" in str(errors[0].error)
    suite.draw_updates(found, tmp_path / "optim.png")
    assert (tmp_path / "optim.png").stat().st_size > 5000
    data, _ = outcome("optim", [found], tmp_path).save(tmp_path)
    assert len(json.loads(data.read_text())["comparisons"][0]["rows"]) == len(found.rows)
    assert {r.facts["bytes"] for r in found.rows if r.name == FP32} == {26_000}


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is here")
def test_worker_tells_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DeepSpeed its process answers with the reason."""
    monkeypatch.setattr(process, "python_of", lambda name: Path(sys.executable))
    arm = DeepSpeed(100)
    with pytest.raises(RuntimeError, match="deepspeed"):
        arm.start()
    arm.close()
