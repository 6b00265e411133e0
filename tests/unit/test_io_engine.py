"""What the engine does above its backends: stripes by rate, stuck disks, refusals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import IoEngine, IoError, OffloadError, Ticket, dispatch, probe
from overspill.io_engine.backend import (
    LATENCY_STEPS,
    Backend,
    Completion,
    LaneCounts,
    Segment,
    Tuning,
)
from overspill.io_engine.engine import open_backend
from tests.patience import WAIT_S

MIB = 1 << 20


class Clock:
    """Stands for ``time``: goes on by what backends of ``Memory`` take, and by nothing else."""

    now_s = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now_s

    @staticmethod
    def monotonic() -> float:
        return 0.0


class Memory:
    """A backend that stores nothing and takes ``seconds_per_mib`` for it, or never ends."""

    name = "memory"

    def __init__(self, seconds_per_mib: float | None) -> None:
        self.seconds_per_mib = seconds_per_mib
        self.ended: list[Completion] = []
        self.started: list[int] = []
        self.promoted: list[int] = []
        self.bytes = [0, 0]

    def submit(self, id: int, write: bool, urgent: bool, segments: Sequence[Segment]) -> None:
        self.started.append(id)
        if self.seconds_per_mib is None:
            return
        nbytes = sum(segment.nbytes for segment in segments)
        self.bytes[write] += nbytes
        Clock.now_s += nbytes / MIB * self.seconds_per_mib
        self.end(id)

    def end(self, id: int, outcome: int = 0, error: int = 0) -> None:
        self.ended.append(Completion(id, outcome, error, 0, 0, 0, 0, 0, 1, 2))

    def cancel(self, id: int) -> bool:
        return False

    def promote(self, id: int) -> None:
        self.promoted.append(id)

    def collect(self, timeout_s: float) -> list[Completion]:
        time.sleep(0.001)  # for whoever asks again and again
        ended, self.ended = self.ended, []
        return ended

    def wake(self) -> None:
        return None

    def add_memory(self, address: int, nbytes: int) -> None:
        return None

    def drop_memory(self, address: int, nbytes: int) -> None:
        return None

    def stats(self) -> list[LaneCounts]:
        return [LaneCounts(self.bytes[0], self.bytes[1], 0, 0, 0, 0, 0, 0)]

    def latencies(self) -> list[int]:
        return [0] * LATENCY_STEPS

    def close(self, timeout_s: float) -> bool:
        return self.seconds_per_mib is not None


def test_stripes_follow_the_measured_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "time", Clock)
    speeds = iter([0.0005, 0.0015])

    def start(fds: Sequence[int], tuning: Tuning) -> Backend:
        return Memory(next(speeds)) if len(fds) == 1 else open_backend(fds, real)

    real = Tuning("aiofiles", MIB, 2)
    places = [tmp_path / "fast", tmp_path / "slow"]
    for place in places:
        place.mkdir()
    with IoEngine(places, 64 * MIB, backend=start, block_bytes=MIB) as engine:
        extent = engine.allocate(32 * MIB)
        fast, slow = (sum(p.nbytes for p in extent.pieces if p.file == f) for f in (0, 1))
        assert fast + slow == 32 * MIB
        assert fast / slow == pytest.approx(3, rel=0.1), "shares do not follow rates of 3 to 1"
        sizes = [(place / "overspill.store").stat().st_size for place in places]
        assert sizes[0] / sizes[1] == pytest.approx(3, rel=0.1)
        with engine.buffer(32 * MIB) as buffer:
            buffer.array[:] = np.arange(32 * MIB, dtype=np.uint32).astype(np.uint8)
            want = buffer.array.copy()
            engine.write(extent, buffer).wait(WAIT_S)
            buffer.array[:] = 0
            engine.read(extent, buffer).wait(WAIT_S)
            assert np.array_equal(buffer.array, want)
    assert all(list(place.iterdir()) == [] for place in places)


def test_close_gives_a_stuck_disk_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "STUCK_AFTER_S", 0.2)
    told: list[Ticket] = []
    engine = IoEngine(tmp_path, 4 * MIB, backend=lambda fds, tuning: Memory(None))
    extents = [engine.allocate(MIB) for _ in range(2)]
    with engine.buffer(MIB) as buffer:
        stuck = [engine.write(extent, buffer) for extent in extents]
        behind = engine.read(extents[0], buffer, on_done=told.append)
        with pytest.raises(TimeoutError, match=r"0\.01 s"):
            stuck[0].wait(0.01)
        begun = time.monotonic()
        engine.close()
        assert time.monotonic() - begun < WAIT_S
        for ticket in (*stuck, behind):
            with pytest.raises(OffloadError):
                ticket.wait(WAIT_S)
        with pytest.raises(IoError, match="nothing has moved"):
            stuck[1].wait(WAIT_S)
    assert told == [behind] and "stuck in the kernel" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_an_urgent_request_hurries_those_it_waits_for(tmp_path: Path) -> None:
    backend = Memory(None)
    engine = IoEngine(tmp_path, 4 * MIB, backend=lambda fds, tuning: backend)
    extent, other = engine.allocate(MIB), engine.allocate(MIB)
    with engine.buffer(MIB) as buffer:
        write = engine.write(extent, buffer)
        engine.write(other, buffer)
        read = engine.read(extent, buffer, urgent=True)
        assert backend.started == [1, 2] and backend.promoted == [1]
        backend.seconds_per_mib = 0.0
        backend.end(1)
        backend.end(2)
        read.wait(WAIT_S)
        assert write.done() and backend.started == [1, 2, 3]
    engine.close()


def test_an_extent_of_another_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with IoEngine(tmp_path / "a", MIB) as one, IoEngine(tmp_path / "b", MIB) as two:
        extent = one.allocate(4096)
        two.allocate(4096)
        with two.buffer(4096) as buffer, pytest.raises(ValueError, match="not an extent of this"):
            two.write(extent, buffer)
        with pytest.raises(ValueError, match="positive"):
            one.allocate(0)


def test_a_backend_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    def start(fds: Sequence[int], tuning: Tuning) -> Backend:
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        IoEngine(tmp_path, MIB, backend=start)
    assert list(tmp_path.iterdir()) == []
    IoEngine(tmp_path, MIB).close()
