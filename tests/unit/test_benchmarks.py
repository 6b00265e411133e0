"""The benchmark harness: arms take turns, failures are rows, ratios are paired."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import arms, step
from benchmarks.deepspeed_settings import KINDS, settings
from benchmarks.machine import facts
from benchmarks.model import Gpt, Shape, build, fill
from benchmarks.results import Comparison, Outcome, number
from benchmarks.runner import Call, Row, Sample, run_interleaved

TINY = Shape(layers=2, width=32, heads=2, vocabulary=64, batch=2, tokens=16)


class Scripted:
    """An arm whose seconds are given; ``None`` fails."""

    def __init__(self, name: str, log: list[str], seconds: list[float | None]) -> None:
        self.name, self._log, self._seconds = name, log, iter(seconds)

    def start(self) -> Mapping[str, Any]:
        self._log.append(f"start {self.name}")
        return {"of": self.name}

    def sample(self) -> Sample:
        self._log.append(self.name)
        seconds = next(self._seconds)
        if seconds is None:
            raise RuntimeError("out of memory")
        return Sample(seconds)

    def close(self) -> None:
        self._log.append(f"close {self.name}")


def test_arms_take_turns() -> None:
    log: list[str] = []
    run_interleaved([Scripted("a", log, [1, 1]), Scripted("b", log, [1, 1])], rounds=2)
    assert log == ["start a", "start b", "a", "b", "a", "b", "close a", "close b"]


def test_rounds_over_the_budget_are_left_out_but_the_first() -> None:
    (row,) = run_interleaved([Scripted("a", [], [1.0, 2.0])], rounds=2, budget_s=0.0)
    assert [sample.seconds for sample in row.samples] == [1.0]


def test_ratios_are_taken_round_by_round() -> None:
    log: list[str] = []
    first, second = run_interleaved(
        [Scripted("a", log, [1.0, 10.0, 2.0]), Scripted("b", log, [2.0, 10.0, 3.0])], rounds=3
    )
    assert first.ratio == 1.0 and first.median_s == 2.0
    assert (second.ratio, second.ratio_low, second.ratio_high) == (1.5, 1.0, 2.0)


def test_an_arm_that_fails_is_a_row_and_does_not_stop_the_others() -> None:
    log: list[str] = []
    first, second = run_interleaved(
        [Scripted("a", log, [1.0, None, 5.0]), Scripted("b", log, [2.0, 2.0, 2.0])], rounds=3
    )
    assert first.error == "RuntimeError: out of memory" and len(first.samples) == 1
    assert second.error is None and len(second.samples) == 3
    assert second.ratio == 2.0
    assert log.count("a") == 2 and "close a" in log


def test_a_result_is_written_and_tells_of_failures(tmp_path: Path) -> None:
    rows = [
        Row("plain", {}, (Sample(1.25),), median_s=1.25, ratio=1.0, ratio_low=1.0, ratio_high=1.0),
        Row("broken", {}, (), error=f"RuntimeError: no {tmp_path}/out/x and {Path.home()}/y"),
    ]
    result = Outcome("step", [Comparison("Title", {"tokens": 4}, rows)], facts(tmp_path), at="now")
    data, text = result.save(tmp_path / "out")
    assert result.failed
    table = text.read_text()
    assert "| plain  | 1.25 s | 1.00 (1.00-1.00) |" in table
    assert "broken: RuntimeError: no DIR/x and ~/y" in table
    kept = json.loads(data.read_text())
    assert kept["comparisons"][0]["rows"][0]["samples"][0]["seconds"] == 1.25
    assert kept["machine"]["cores"] >= 1 and kept["machine"]["packages"]["torch"]


def test_a_call_is_warmed_up_once() -> None:
    runs = iter([9.0, 1.0, 2.0])
    (row,) = run_interleaved([Call("work", lambda: next(runs))], rounds=2)
    assert [sample.seconds for sample in row.samples] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.00123456, "0.00123"), (1234.0, "1234"), (2.0, "2.00")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_model_has_its_values_with_memory_and_gets_the_same_ones_part_by_part() -> None:
    assert 0.9 < float(Gpt(TINY).tokens.weight.std()) < 1.1
    first, second = build(TINY), build(dataclasses.replace(TINY, inner=64, kv_heads=1))
    for model in (first, second):
        model.to_empty(device="cpu")
        for module in reversed(list(model.modules())):
            fill(module)
    again = build(TINY).to_empty(device="cpu")
    for module in again.modules():
        fill(module)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert all(bool(p.isfinite().all()) for p in second.parameters())
    assert float(second.norm.weight.mean()) == 1.0


@pytest.fixture
def worker() -> Iterator[arms.Worker]:
    plan = arms.Plan(TINY, "fp32", rounds=1, steps=2, warmup=2)
    worker = arms.Worker("plain", plan, "cpu", None)
    yield worker
    worker.close()


def test_a_worker_trains_in_its_own_process(worker: arms.Worker) -> None:
    known = worker.start()
    assert known["parameters"] == arms.parameters(TINY)
    assert known["shape"] == dataclasses.asdict(TINY)
    sample = worker.sample()
    assert sample.seconds > 0 and 0 < sample.seen["loss"] < 10
    assert sample.seen["peak_rss_bytes"] > 1 << 20


def test_what_a_worker_cannot_do_is_its_error() -> None:
    plan = arms.Plan(TINY, "fp32", rounds=1, steps=1, warmup=1)
    arm = arms.Worker("refused", plan, "cpu", {"no_such_option": 1})
    (row,) = run_interleaved([arm], rounds=1)
    assert row.error is not None and "no_such_option" in row.error


def test_a_peer_that_is_not_installed_is_a_row_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERSPILL_PEERS", str(tmp_path))
    plan = arms.Plan(TINY, "bf16", rounds=1, steps=1, warmup=2)
    (row,) = run_interleaved([arms.peer("deepspeed-nvme", plan, tmp_path, "cpu")], rounds=1)
    assert row.error is not None and "benchmarks.peers install deepspeed" in row.error


def test_an_unknown_peer_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no peer 'nobody'; there are torch-fp32, deepspeed-nvme"):
        step.run(quick=True, folder=tmp_path, peers=["nobody"])


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_deepspeed_train_the_same_way(kind: str) -> None:
    config = settings(kind, batch=2, rate=1e-4, bf16=True, nvme="/there")
    assert config["gradient_clipping"] == 0.0 and config["bf16"]["enabled"]
    assert config["train_micro_batch_size_per_gpu"] == 2
    where = config["zero_optimization"]["offload_optimizer"]
    assert where["device"] == ("nvme" if kind == "zero3-nvme" else "cpu")
