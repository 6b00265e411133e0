"""Rates as values and files, their cache, and that measuring is short and sane."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from overspill.observe import probes, rates
from overspill.observe.rates import Rates, cached, measure


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


# -- the cache ----------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Counts measurements, each of which gives another rate, and sends the cache to tmp_path."""
    calls: list[int] = []

    def fake(directories: object, device: object) -> Rates:
        calls.append(len(calls) + 1)
        return Rates(dram_bytes_s=float(len(calls)))

    monkeypatch.setattr(rates, "measure", fake)
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


# -- measuring ----------------------------------------------------------------------------------


def test_measuring_is_bounded_and_leaves_nothing(tmp_path: Path) -> None:
    started = time.perf_counter()
    measured = measure([tmp_path], "cpu")
    assert time.perf_counter() - started < 6.0
    assert list(tmp_path.iterdir()) == []
    unknown = {name for name, value in asdict(measured).items() if value is None}
    assert unknown == {"h2d_bytes_s", "d2h_bytes_s", "link_latency_s"}
    assert measured.disk_both_bytes_s is not None and measured.disk_both_bytes_s > 1e6
    assert measured.disk_read_bytes_s is not None and measured.disk_read_bytes_s > 1e6
    assert measured.dram_bytes_s is not None and 1e8 < measured.dram_bytes_s < 1e13
    assert measured.update_params_s is not None and measured.update_params_s > 1e5


def test_without_a_store_disk_rates_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MEASURE_S", 0.05)
    measured = measure([], "sim")
    assert measured.disk_read_bytes_s is None and measured.disk_write_bytes_s is None
    assert measured.device_flops_s is not None


def test_a_full_disk_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "_free_bytes", lambda directories: 31 << 20)
    assert probes.disk([tmp_path], 0.1) is None


def test_the_best_of_some_runs_counts() -> None:
    naps = iter([0.05, 0.03, 0.002, 0.02])
    assert 0.002 <= probes.best_s(lambda: time.sleep(next(naps)), 0.09) < 0.02
