"""Costs of updates: bytes by format, bounded work, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from overspill.cli.app import app
from overspill.optim import bench, kernels
from overspill.optim.bench import CASES, Case, MeasuredUpdate, update_costs
from overspill.optim.registry import MEASURED

ADAMW = {case.moments: case for case in CASES if case.rule == "adamw" and case.master == "split"}


def test_bytes_are_those_of_the_formats() -> None:
    numel = 512
    expected = {"fp32": (26, 12), "bf16": (18, 8), "int8": (14 + 16 / 256, 6 + 8 / 256)}
    for moments, (moved, held) in expected.items():
        update = MeasuredUpdate(ADAMW[moments], numel)
        assert (update.moved_bytes, update.held_bytes) == (moved, held)
    assert MeasuredUpdate(Case("sgd", torch.float32, None, "fp32"), numel).moved_bytes == 12
    whole = MeasuredUpdate(Case("adamw", torch.bfloat16, "fp32", "fp32"), numel)
    assert (whole.moved_bytes, whole.held_bytes) == (28, 14)


def test_every_case_is_measured_and_threads_are_set_back() -> None:
    before = kernels.threads()
    costs = update_costs(numel=4096, rounds=1)
    assert [cost.case for cost in costs.costs] == list(CASES)
    for cost in costs.costs:
        assert costs.of(cost.case) is cost
        assert min(cost.one_thread, cost.all_threads, cost.beside_traffic, cost.bound_share) > 0
    assert costs.memory_bytes_s > 0
    assert costs.traffic_bytes_s > 0
    assert (costs.threads, kernels.threads()) == (before, before)
    with pytest.raises(KeyError):
        costs.of(Case("sgd", torch.float16, None, "fp32"))
    with pytest.raises(ValueError, match="at least 1, not 4096 and 0"):
        update_costs(numel=4096, rounds=0)


@pytest.mark.parametrize("rule", MEASURED)
def test_every_rule_can_be_measured(rule: str) -> None:
    """``wrap`` measures that of the optimizer it is given."""
    assert MeasuredUpdate(Case(rule, torch.bfloat16, "split", "fp32"), 512).run() > 0


def test_the_start_of_threads_is_no_part_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sixteen threads it took five times as long as what they did."""
    to_start = 0

    def set_threads(count: int) -> None:
        nonlocal to_start
        to_start = count - 1

    def run(update: MeasuredUpdate) -> float:
        nonlocal to_start
        seconds, to_start = 1.0 + 99 * bool(to_start), 0
        return seconds

    monkeypatch.setattr(bench, "threads", lambda: 16)
    monkeypatch.setattr(bench, "set_threads", set_threads)
    monkeypatch.setattr(MeasuredUpdate, "run", run)
    (cost,) = update_costs(cases=CASES[:1], numel=4096, rounds=3).costs
    assert (cost.one_thread, cost.all_threads, cost.beside_traffic) == (4096, 4096, 4096)


def test_command(tmp_path: Path) -> None:
    small = ["bench", "optim", "--quick", "--parameters", "4096"]
    table = CliRunner().invoke(app, small)
    assert table.exit_code == 0, table.output
    assert "int8" in table.stdout
    assert "GB/s" in table.stdout
    told = CliRunner().invoke(app, [*small, "--json", "--out", str(tmp_path)])
    content = json.loads(told.stdout)
    assert content == json.loads((tmp_path / "optim.json").read_text())
    assert [cost["case"]["moments"] for cost in content["costs"]] == [
        "fp32", "bf16", "int8", "fp32"
    ]  # fmt: skip
    refused = CliRunner().invoke(app, ["bench", "optim", "--parameters", "0"])
    assert refused.exit_code != 0
    assert "--parameters must be 1" in refused.output
