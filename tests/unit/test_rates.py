"""Rates as values and files, and that measuring is short and sane."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.facts.rates import Rates
from overspill.io_engine import Extent, IoEngine, Ticket
from overspill.measure import machine_rates, probes
from overspill.measure.calibration import Task, calibrate
from overspill.measure.machine_rates import measure
from overspill.optim.bench import Case, device_update_rate
from tests.patience import in_the_end


def test_files_keep_every_rate(tmp_path: Path) -> None:
    values = Rates(h2d_bytes_s=5.3e10, link_latency_s=0, update_params_s=1 / 3)
    values.to_file(tmp_path / "rates.json")
    assert Rates.from_file(tmp_path / "rates.json") == values


def test_left_out_rates_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text('{"disk_read_bytes_s": 7e9}')
    assert Rates.from_file(tmp_path / "rates.json") == Rates(disk_read_bytes_s=7e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"h2d_bytes": 1}', "unknown rate h2d_bytes; known: h2d_bytes_s"),
        ('{"h2d_bytes_s": NaN}', "h2d_bytes_s must be finite and more than 0, got nan"),
        ('{"h2d_bytes_s": Infinity}', "must be finite"),
        ('{"h2d_bytes_s": -1}', "more than 0, got -1"),
        ('{"h2d_bytes_s": 0}', "more than 0, got 0"),
        ('{"link_latency_s": -1e-6}', "link_latency_s must be finite and at least 0"),
        ('{"h2d_bytes_s": "5GB"}', "must be a number or None, got '5GB'"),
        ('{"h2d_bytes_s": true}', "must be a number or None, got True"),
        ("[1]", "expected a JSON object of rates, got list"),
        ("{", "rates.json: "),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Rates.from_file(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_nan_does_not_get_in_by_the_constructor() -> None:
    with pytest.raises(ValueError, match="dram_bytes_s"):
        Rates(dram_bytes_s=math.nan)


# -- measuring ----------------------------------------------------------------------------------


@pytest.mark.alone
def test_measuring_is_bounded_and_leaves_nothing(tmp_path: Path) -> None:
    def bounded() -> Rates:
        started = time.perf_counter()
        measured = measure([tmp_path], "cpu")
        assert time.perf_counter() - started < 6.0
        return measured

    measured = in_the_end(bounded)
    assert list(tmp_path.iterdir()) == []
    unknown = {name for name, value in asdict(measured).items() if value is None}
    assert unknown == {
        "h2d_bytes_s", "d2h_bytes_s", "h2d_pageable_bytes_s", "d2h_pageable_bytes_s",
        "link_latency_s", "update_params_s", "update_beside_params_s", "device_flops_s",
        "device_update_params_s", "host_flops_s", "device_memory_bytes_s", "device_update_flops_s",
        "wire_bytes_s",
    }  # fmt: skip
    assert measured.disk_both_bytes_s is not None and measured.disk_both_bytes_s > 1e6
    assert measured.disk_read_bytes_s is not None and measured.disk_read_bytes_s > 1e6
    assert measured.dram_bytes_s is not None and 1e8 < measured.dram_bytes_s < 1e13
    assert measured.disk_cpu_bytes_s is not None and measured.disk_cpu_bytes_s > 1e6


def test_without_a_store_disk_rates_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "MEASURE_S", 0.05)
    measured = measure([], "sim")
    assert measured.disk_read_bytes_s is None and measured.disk_write_bytes_s is None
    assert measured.dram_bytes_s is not None


def test_products_and_updates_are_measured() -> None:
    assert machine_rates.measure_flops("sim", torch.bfloat16) > 1e8
    case = Case("adamw", torch.bfloat16, "split", "int8")
    found = machine_rates.measure_update(case, "sim")
    assert found.alone_params_s > 1e5 and found.beside_params_s > 1e5
    assert found.device_params_s is None, "a simulated device updates as the CPU does"
    assert device_update_rate(case, torch.device("cpu"), numel=10_000, rounds=2) > 1e4


class SlowDisk(IoEngine):
    """Moves 0.5 MB/s."""

    def _slowly(self, extent: Extent) -> None:
        time.sleep(extent.nbytes / 5e5)

    def read(self, extent: Extent, *args: Any, **more: Any) -> Ticket:
        self._slowly(extent)
        return super().read(extent, *args, **more)

    def write(self, extent: Extent, *args: Any, **more: Any) -> Ticket:
        self._slowly(extent)
        return super().write(extent, *args, **more)


@pytest.mark.alone
def test_a_slow_disk_is_measured_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole calibration ends within 20 s, and tells the disk's rate."""
    monkeypatch.setattr(probes, "IoEngine", SlowDisk)
    task = Task(Case("adamw", torch.bfloat16, "split", "fp32"), torch.bfloat16)
    caches = (tmp_path / f"cache{number}" for number in itertools.count())

    def in_time() -> None:
        monkeypatch.setenv("OVERSPILL_CACHE", str(next(caches)))
        started = time.perf_counter()
        found = calibrate([tmp_path], "cpu", task).rates
        assert time.perf_counter() - started < 20.0
        assert found.disk_read_bytes_s == pytest.approx(5e5, rel=0.1)
        assert found.disk_write_bytes_s == pytest.approx(5e5, rel=0.1)

    in_the_end(in_time, tries=4)


def test_a_full_disk_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "_free_bytes", lambda directories: 31 << 20)
    assert probes.disk([tmp_path], 0.1) is None


def test_the_best_of_some_runs_counts() -> None:
    def counts() -> None:
        naps = iter([0.05, 0.03, 0.002, 0.02])
        assert 0.002 <= probes.best_s(lambda: time.sleep(next(naps)), 0.09) < 0.02

    in_the_end(counts)
