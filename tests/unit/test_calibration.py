"""What is measured is kept: once per machine, disks and device; anew on request or in doubt."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from overspill.facts.rates import Rates, UpdateRate
from overspill.facts.stats import LaneStats, Stats
from overspill.facts.trace import LANES
from overspill.measure import machine_rates
from overspill.measure.calibration import Task, calibrate
from overspill.measure.steps import STEPS, Drift
from overspill.optim.bench import Case, case_of
from overspill.optim.registry import rules_for

ADAMW = Case("adamw", torch.bfloat16, "split", "fp32")


def cached(directories: list[str] | list[Path], device: str) -> Rates:
    return calibrate(directories, device).rates


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Counts measurements, each of which gives another rate, and sends the cache to tmp_path."""
    calls: list[int] = []

    def fake(directories: object, device: object) -> Rates:
        calls.append(len(calls) + 1)
        return Rates(dram_bytes_s=float(len(calls)))

    monkeypatch.setattr(machine_rates, "measure", fake)
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    return calls


def test_the_second_call_measures_nothing(counted: list[int], tmp_path: Path) -> None:
    assert cached([tmp_path], "cpu") == cached([tmp_path], "cpu") == Rates(dram_bytes_s=1.0)
    assert counted == [1]


def test_disks_and_devices_are_kept_apart(counted: list[int], tmp_path: Path) -> None:
    given = [
        cached([tmp_path], "cpu"),
        cached([tmp_path], "sim"),
        cached([tmp_path, tmp_path], "cpu"),
        cached(["/proc"], "cpu"),
        cached([], "cpu"),
    ]
    assert [value.dram_bytes_s for value in given] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_folders_of_one_disk_share_its_rate(counted: list[int], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert cached([tmp_path / "there"], "cpu") == cached([tmp_path / "not" / "yet"], "cpu")
    assert counted == [1]


@pytest.mark.parametrize("damage", ["{", "[]", '{"about": 1}', '{"rates": {"x": 1}}'])
def test_a_damaged_cache_is_said_and_replaced(
    counted: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cached([tmp_path], "cpu")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(damage)
    assert cached([tmp_path], "cpu") == Rates(dram_bytes_s=2.0)
    assert "measuring again" in caplog.text
    assert json.loads(kept.read_text())["rates"]["dram_bytes_s"] == 2.0


def test_without_a_place_to_keep_them_rates_are_given_all_the_same(
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "file" / "below"))
    assert cached([], "cpu") == Rates(dram_bytes_s=1.0)
    assert "could not keep the measured rates" in caplog.text


# -- updates and products -------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> list[str]:
    """Counts measurements of updates and products."""
    calls: list[str] = []

    def update(case: Case, device: object) -> UpdateRate:
        calls.append(f"{case.rule} {case.moments}")
        there = None if device == "cpu" else 100.0
        return UpdateRate(len(calls), len(calls) / 2, there)

    def flops(device: object, dtype: torch.dtype) -> float:
        calls.append(str(dtype))
        return 1e9 * len(calls)

    monkeypatch.setattr(machine_rates, "measure_update", update)
    monkeypatch.setattr(machine_rates, "measure_flops", flops)
    return calls


def test_each_rule_and_dtype_is_measured_once(asked: list[str], tmp_path: Path) -> None:
    """Rates by rule and format, alone and beside traffic, and FLOPs by dtype, are kept."""
    first, other = Task(ADAMW, torch.bfloat16), Task(ADAMW, torch.float32)
    for task in (first, other, first):
        found = calibrate([tmp_path], "cpu", task)
    assert asked == ["adamw fp32", "torch.bfloat16", "torch.float32"]
    assert found.for_task(first).update_params_s == 1
    assert found.for_task(first).update_beside_params_s == 0.5
    assert found.for_task(first).device_flops_s == 2e9
    assert found.for_task(other).device_flops_s == 3e9
    assert found.for_task(Task(None, torch.float16)) == found.rates == found.for_task(None)


def test_products_of_updates_are_measured_on_both_sides(asked: list[str], tmp_path: Path) -> None:
    task = Task(None, torch.bfloat16, update_products=torch.float32)
    for _ in range(2):
        found = calibrate([tmp_path], "sim", task)
    assert asked == ["torch.bfloat16", "torch.float32", "torch.float32"], "the last on the CPU"
    known = found.for_task(task)
    assert (known.device_flops_s, known.device_update_flops_s, known.host_flops_s) == (
        1e9, 2e9, 3e9
    )  # fmt: skip
    other = found.for_task(Task(None, torch.bfloat16))
    assert other.host_flops_s is None and other.device_update_flops_s is None


def test_the_rate_of_updates_on_the_device_is_kept(asked: list[str], tmp_path: Path) -> None:
    task = Task(ADAMW, torch.bfloat16)
    assert calibrate([tmp_path], "cpu", task).for_task(task).device_update_params_s is None
    for _ in range(2):
        found = calibrate([tmp_path], "sim", task).for_task(task)
        assert found.device_update_params_s == 100
    assert len(asked) == 4


def test_on_request_all_is_measured_anew(asked: list[str], tmp_path: Path) -> None:
    task = Task(ADAMW, torch.bfloat16)
    assert calibrate([tmp_path], "cpu", task).for_task(task).update_params_s == 1
    assert calibrate([tmp_path], "cpu", task, remeasure=True).for_task(task).update_params_s == 3
    assert calibrate([tmp_path], "cpu", task).for_task(task).update_params_s == 3


def test_what_is_in_doubt_is_measured_anew_by_the_next_run(
    counted: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = calibrate([tmp_path], "cpu")
    found.doubted("lane read moves 0.1 GB/s")
    assert "no longer hold: lane read moves 0.1 GB/s; the next run" in caplog.text
    with caplog.at_level(logging.INFO, "overspill"):
        assert calibrate([tmp_path], "cpu").rates == Rates(dram_bytes_s=2.0)
    assert "measuring this machine again, since lane read" in caplog.text
    assert calibrate([tmp_path], "cpu").rates == Rates(dram_bytes_s=2.0)


def test_optimizers_are_measured_as_what_they_are() -> None:
    weight = [torch.zeros(1)]
    for optimizer, name in (
        (torch.optim.AdamW(weight), "adamw"),
        (torch.optim.Adam(weight), "adamw"),
        (torch.optim.Adam(weight, amsgrad=True), "amsgrad"),
        (torch.optim.SGD(weight), "sgd"),
        (torch.optim.SGD(weight, momentum=0.9), "momentum"),
        (torch.optim.Adagrad(weight), "adagrad"),
    ):
        found = case_of(rules_for(optimizer)[0], torch.bfloat16, "split", "fp32")
        assert found == Case(name, torch.bfloat16, "split", "fp32")


# -- drift ----------------------------------------------------------------------------------------


def step(read_bytes: int, busy_s: float) -> Stats:
    lanes = dict.fromkeys(LANES, LaneStats()) | {"read": LaneStats(read_bytes, busy_s, 0.0)}
    return Stats(1.0, 1.0, lanes)


def told(*steps: Stats) -> list[str]:
    drift = Drift(Rates(disk_read_bytes_s=1e9))
    return [said for each in steps if (said := drift.see(each)) is not None]


def test_a_lane_that_stays_off_its_rate_is_said() -> None:
    slow, fast, right = step(10**8, 1.0), step(10**8, 0.05), step(10**8, 0.2)
    assert told(*[slow] * (STEPS - 1)) == []
    assert told(*[slow] * STEPS) == ["lane read moves 0.1 GB/s, 1 GB/s were measured"]
    assert told(*[fast] * STEPS) == ["lane read moves 2 GB/s, 1 GB/s were measured"]
    assert told(*[slow, slow, right, slow, fast] * STEPS) == []
    assert told(*[step(10**6, 1.0)] * 2 * STEPS) == [], "too little to tell"
    assert told(*[step(7 * 10**7, 0.25)] * 2 * STEPS) == [], "slow, but nobody waits for it"


def test_reads_beside_writes_are_held_against_their_share() -> None:
    rates = Rates(disk_read_bytes_s=1e9, disk_write_bytes_s=3e9, disk_both_bytes_s=1.2e9)
    busy = {name: LaneStats(10**9, 1.0, 0.0) for name in ("read", "write")}

    def told_of(**lanes: LaneStats) -> list[str]:
        drift, seen = Drift(rates), Stats(1.0, 1.0, dict.fromkeys(LANES, LaneStats()) | lanes)
        return [said for _ in range(STEPS) if (said := drift.see(seen)) is not None]

    assert told_of(**busy) == [], "a third of its own rate is what writes have beside reads"
    assert len(told_of(write=busy["write"])) == 1
    assert len(told_of(read=busy["read"], write=LaneStats(10**8, 1.0, 0.0))) == 1


def test_a_run_at_other_rates_has_them_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine tells the calibration, and only where it measured: given rates are the user's."""
    import overspill
    from overspill.measure import steps

    wrong = Rates(disk_read_bytes_s=1e15, disk_write_bytes_s=1e15, dram_bytes_s=1e9)
    monkeypatch.setattr(machine_rates, "measure", lambda *_: wrong)
    monkeypatch.setattr(steps, "LEAST_BYTES", 1)
    monkeypatch.setattr(steps, "LEAST_SHARE", 0.0)
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))

    def train(**more: object) -> list[str | None]:
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
        adamw = torch.optim.AdamW(model.parameters())
        with overspill.wrap(
            model, adamw, device="cpu", host_memory=60_000, nvme=tmp_path, durable=False, **more
        ) as optimizer:
            for _ in range(STEPS):
                model(torch.ones(2, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        files = sorted((tmp_path / "cache").glob("rates-*.json"))
        return [json.loads(path.read_text())["doubt"] for path in files]

    assert train(rates=wrong) == []
    (doubt,) = train()
    assert doubt is not None and "GB/s were measured" in doubt
