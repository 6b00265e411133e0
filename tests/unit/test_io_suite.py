"""The disk suite: all arms move the same bytes, the best are picked, goals are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import io_arms
from benchmarks.io import SMALL, Scale, columns, compare_checksums
from benchmarks.io_arms import MIB
from benchmarks.io_picture import draw_rates
from benchmarks.results import Comparison
from benchmarks.runner import Row, Sample, run_interleaved
from overspill.io_engine import IoEngine, allocate_host

NBYTES = 128 * MIB


@pytest.mark.parametrize("mode", ["read", "write", "both"])
def test_every_mode_moves_every_extent_once_a_pass(mode: str) -> None:
    steps = list(io_arms.Work(mode, NBYTES, 2).steps(4))
    assert [index for _, index in steps] == [0, 1, 2, 3] * 2
    written = [index for write, index in steps if write]
    assert (
        sorted(written)
        == {"read": [], "write": [0, 0, 1, 1, 2, 2, 3, 3], "both": [0, 1, 2, 3]}[mode]
    )


def test_extents_have_the_sizes_of_an_optimizer() -> None:
    assert sum(io_arms.extent_sizes(1024 * MIB)) == 1024 * MIB
    assert {size // MIB for size in io_arms.extent_sizes(NBYTES)} == {16, 32, 64}
    with pytest.raises(ValueError, match="multiple"):
        io_arms.extent_sizes(100 * MIB)


def test_the_memory_of_fio() -> None:
    settings = io_arms.fio_settings("both", huge=True, quick=False)
    assert io_arms.fio_memory_bytes(settings["fio io_uring 128k"]) == 8 * MIB
    assert io_arms.fio_memory_bytes(settings["fio psync 4M, huge pages"]) == 4 * MIB
    assert io_arms.fio_memory_bytes(settings["fio psync 1M x 4 threads"]) == 4 * MIB
    assert io_arms.fio_memory_bytes(settings["fio libaio 4M, reader + writer"]) == 64 * MIB


@pytest.mark.parametrize("mode", ["read", "both"])
def test_fio_moves_the_same_bytes_as_ours(mode: str, tmp_path: Path) -> None:
    work = io_arms.Work(mode, NBYTES, 2)
    with IoEngine(tmp_path, NBYTES, checksum=False) as engine, engine.buffer(NBYTES) as memory:
        extents = [engine.allocate(size) for size in io_arms.extent_sizes(NBYTES)]
        ours = io_arms.Ours("overspill", engine, extents, memory, work)
        settings = io_arms.fio_settings(mode, huge=False, quick=True)
        name = sorted(settings)[-1]
        fio = io_arms.Fio(name, Path(engine.stats.lanes[0].path), work, settings[name])
        ours.fill()
        before = engine.stats
        rows = run_interleaved([ours, fio], 1)
        moved = engine.stats.bytes_read + engine.stats.bytes_written
        moved -= before.bytes_read + before.bytes_written
    assert moved == 2 * work.moved_bytes, "warmed up, measured"
    assert rows[0].error is None
    if rows[1].error is None:  # it checks what fio says that it moved
        assert rows[1].samples[0].seen["cpu_s"] > 0
    else:
        assert "fio" in rows[1].error, "no fio here"


def test_a_peer_that_is_missing_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_PEERS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"benchmarks\.peers install deepspeed") as caught:
        io_arms.DeepSpeed(tmp_path / "file", [MIB])
    work = io_arms.Work("read", NBYTES, 2)
    (row,) = run_interleaved([io_arms.Aio("DeepSpeed", None, work, 1, MIB, str(caught.value))], 1)
    assert row.error is not None and "install deepspeed" in row.error


def row(name: str, seconds: float, cpu_s: float, memory_bytes: int = 1024 * MIB) -> Row:
    samples = (Sample(seconds, {"cpu_s": cpu_s, "others": 0.0}),)
    return Row(name, {"memory_bytes": memory_bytes}, samples, None, seconds, seconds / 0.2)


def test_goals_are_said_and_drawn(tmp_path: Path) -> None:
    lean, greedy = row("overspill uring", 0.2, 0.01), row("overspill threads", 0.2, 0.03)
    small = row(SMALL, 0.15, 0.03, 4 * MIB)
    goal = dict(columns(io_arms.Work("read", 10**9, 1), [lean, greedy, small]))["goal"]
    assert goal(lean).endswith("holds") and goal(greedy).endswith("MISSED") and goal(small) == "-"
    assert goal(row("overspill uring, checksums", 0.2, 0.06)).endswith("0.07: holds")
    assert "holds (0.98)" in goal(row("fio libaio", 0.196, 0.03, 32 * MIB))
    assert "MISSED (0.96)" in goal(row("fio libaio", 0.192, 0.03, 32 * MIB))
    assert "holds (1.00, in cache)" in goal(row("fio psync", 0.15, 0.03, 4 * MIB))
    assert goal(Row("DeepSpeed", {}, (), "missing")) == "-"
    pytest.importorskip("matplotlib")
    comparison = Comparison("read", {"moved_bytes": 10**9}, [lean, row("fio", 0.3, 0.1)])
    draw_rates([comparison], tmp_path / "io.png")
    draw_rates([comparison, comparison], tmp_path / "io.png")
    assert (tmp_path / "io.png").stat().st_size > 5000


def test_rounds_fit_the_budget() -> None:
    scale = Scale(NBYTES, 2, least_rounds=5, most_rounds=15, budget_s=70.0)
    assert scale.rounds(10, 0.7) == 9
    assert scale.rounds(10, 100.0) == 5 and scale.rounds(1, 0.001) == 15


def test_the_cost_of_a_checksum_is_measured() -> None:
    with allocate_host(16 * MIB) as memory:
        found = compare_checksums(memory, quick=True)
    assert [row.name for row in found.rows] == ["overspill CRC-32", "zlib.crc32"]
    assert all(row.error is None and row.median_s for row in found.rows)
    assert "at most 0.05 s/GB" in found.table()
