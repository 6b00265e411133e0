"""Settings that are tried, picked, kept for a directory and used there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from overspill.io_engine import IoEngine, IoError
from overspill.io_engine.backend import DEFAULT_BLOCK_BYTES, Tuning
from overspill.io_engine.bench import MODES, Measurement, available_backends, bench, pick, quantile
from overspill.io_engine.settings import remember, remembered, settings_path

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))


def measured(tuning: Tuning, rates: tuple[float, float, float], cpu: float) -> list[Measurement]:
    return [
        Measurement(mode, tuning, rate, cpu, 0.0, 0.0, 0.0)
        for mode, rate in zip(MODES, rates, strict=True)
    ]


def test_the_least_cpu_wins_among_the_fast() -> None:
    fast, lean, slow = (Tuning("uring", MIB, depth) for depth in (32, 16, 4))
    tried = [
        *measured(fast, (5e9, 5e9, 5e9), 0.020),
        *measured(lean, (4.9e9, 4.9e9, 4.9e9), 0.010),
        *measured(slow, (9e9, 9e9, 1e9), 0.001),
    ]
    assert pick(tried) == lean
    assert pick([m for m in tried if m.tuning != lean]) == fast


def test_quantiles_of_counted_latencies() -> None:
    steps = [0] * 160
    steps[40], steps[80] = 99, 1
    assert quantile(steps, 0.5) == pytest.approx(1024e-9)
    assert quantile(steps, 0.99) == pytest.approx(1024e-9)
    assert quantile(steps, 1.0) == pytest.approx(2**20 * 1e-9)
    assert quantile([0] * 160, 0.5) == 0.0


def test_a_bench_measures_every_setting_and_the_engine_uses_the_best(tmp_path: Path) -> None:
    seen: list[Measurement] = []
    report = bench(
        tmp_path,
        nbytes=4 * MIB,
        block_sizes=(64 * KIB, 128 * KIB),
        queue_depths=(4, 8),
        rounds=1,
        progress=seen.append,
    )
    assert list(report.measurements) == seen
    assert len(seen) == len(MODES) * 4 * len(available_backends())
    for m in seen:
        assert m.bytes_s > 0 and 0 < m.latency_median_s <= m.latency_p99_s <= m.latency_max_s < 10
    assert report.kept_in == str(settings_path(tmp_path))
    assert remembered(tmp_path) == report.best
    with IoEngine(tmp_path, MIB) as engine:
        assert engine.tuning == report.best and engine.backend == report.best.backend
    with IoEngine(tmp_path, MIB, backend="aiofiles", block_bytes=8192) as engine:
        assert engine.tuning == Tuning("aiofiles", 8192, 4)
    with IoEngine(tmp_path, MIB, queue_depth=3) as engine:
        assert engine.tuning.queue_depth == 3
        assert engine.tuning.block_bytes == report.best.block_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache"]


def test_a_bench_that_is_not_to_be_kept(tmp_path: Path) -> None:
    options = {"nbytes": MIB, "block_sizes": (65536,), "queue_depths": (4,), "rounds": 1}
    assert bench(tmp_path, backends=["aiofiles"], keep=False, **options).kept_in is None
    assert remembered(tmp_path) is None
    with pytest.raises(IoError, match="does not exist"):
        bench(tmp_path / "nowhere", **options)


@pytest.mark.parametrize(
    "text", ["", "{", '{"tuning": 3}', '{"tuning": {"backend": "uring", "block_bytes": -4096, '
             '"queue_depth": 1}}'],
)  # fmt: skip
def test_an_unsound_setting_is_said_and_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = remember(tmp_path, Tuning("threads", MIB, 4))
    assert path is not None and remembered(tmp_path) == Tuning("threads", MIB, 4)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert remembered(tmp_path) is None
    assert "setting" in caplog.text
    with IoEngine(tmp_path, MIB) as engine:
        assert engine.tuning.block_bytes == DEFAULT_BLOCK_BYTES


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    assert remember(tmp_path, Tuning("threads", MIB, 4)) is None
    assert "cannot keep" in caplog.text
