"""Seeded mistakes of the disk: never a wrong byte without an error, never a hang, never a leak.

1,000 seeds by default, 10,000 with ``-m soak``; a failure names its seed, and
``python -m tests.sim.test_io_faults SEED`` plays it again.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import CorruptionError, IoEngine, IoError, Lease, allocate_host
from overspill.io_engine.native import NATIVE
from tests.faults import Faults, faulty_disk
from tests.patience import WAIT_S
from tests.sim.io_scenario import ARENA_BYTES, Scenario, faults_of

pytestmark = pytest.mark.skipif(NATIVE is None, reason="simulated disks need the extension")


@pytest.fixture
def arena() -> Iterator[Lease]:
    with allocate_host(ARENA_BYTES) as lease:
        yield lease


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Memory where there is some: thousands of stores are opened."""
    if os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder)
    else:
        yield tmp_path


@pytest.mark.parametrize(
    "scenarios",
    [1_000, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
def test_seeded_mistakes(scenarios: int, directory: Path) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    seen: Counter[str] = Counter()
    for seed in range(scenarios):
        try:
            outcome = Scenario(seed, directory).run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {faults_of(seed)}: {error!r}") from error
        seen.update(outcome.errors)
        seen["right"] += outcome.right
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    # The mistakes were made, and most transfers went well all the same.
    assert seen["CorruptionError"] >= scenarios // 10 and seen["IoError"] >= scenarios // 10
    assert seen["right"] >= scenarios


@pytest.mark.parametrize("kind", ["bit_flip", "torn_write", "lost_write", "misdirected"])
def test_every_silent_mistake_is_caught(kind: str, arena: Lease, directory: Path) -> None:
    for seed in range(10):
        faults = Faults(seed=seed, **{kind: 1.0})
        with IoEngine(
            directory, 1 << 20, backend=faulty_disk(faults), block_bytes=4096, ephemeral=True
        ) as engine:
            extent = engine.allocate(3 * 4096)
            buffer = arena.array[: 3 * 4096]
            buffer[:] = np.random.default_rng(seed).integers(1, 256, buffer.size, dtype=np.uint8)
            engine.write(extent, buffer).wait(WAIT_S)
            with pytest.raises(Exception, match="CRC-32 expected"):
                engine.read(extent, buffer).wait(WAIT_S)


@pytest.mark.parametrize("kind", ["short_transfer", "again", "delay"])
def test_every_harmless_mistake_is_mended(kind: str, arena: Lease, directory: Path) -> None:
    faults = Faults(seed=3, **{kind: 0.5})
    with IoEngine(
        directory, 1 << 20, backend=faulty_disk(faults), block_bytes=16384, ephemeral=True
    ) as engine:
        extents = [engine.allocate(10_000) for _ in range(8)]
        buffer = arena.array[:10_000]
        for value, extent in enumerate(extents):
            buffer[:] = value
            engine.write(extent, buffer).wait(WAIT_S)
        for value, extent in enumerate(extents):
            engine.read(extent, buffer).wait(WAIT_S)
            assert (buffer == value).all()
        assert kind == "delay" or engine.stats.retries > 0


def test_a_disk_that_never_gives_an_answer_but_again(arena: Lease, directory: Path) -> None:
    faults = Faults(seed=3, again=1.0)
    with IoEngine(directory, 1 << 20, backend=faulty_disk(faults), ephemeral=True) as engine:
        extent = engine.allocate(4096)
        with pytest.raises(Exception, match=r"temporarily|Interrupted"):
            engine.write(extent, arena.array[:4096]).wait(WAIT_S)


@pytest.mark.parametrize(("kind", "code"), [("io_error", errno.EIO), ("no_space", errno.ENOSPC)])
def test_a_plain_refusal_is_reported_at_once(
    kind: str, code: int, arena: Lease, directory: Path
) -> None:
    faults = Faults(seed=3, **{kind: 1.0})
    with IoEngine(directory, 1 << 20, backend=faulty_disk(faults), ephemeral=True) as engine:
        extent = engine.allocate(8192)
        ticket = engine.write(extent, arena.array[:8192])
        with pytest.raises(IoError, match=os.strerror(code)) as caught:
            ticket.wait(WAIT_S)
        error = caught.value
        assert error.errno == code and error.nbytes == 8192
        assert error.path.endswith("overspill.store") and error.offset == extent.pieces[0].offset
        assert engine.stats.retries == 0 and engine.stats.failures == 1
        with pytest.raises(CorruptionError, match="is incomplete"):
            engine.read(extent, arena.array[:8192]).wait(WAIT_S)


def test_a_slow_request_is_reported(
    arena: Lease, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(seed=3, delay=1.0, longest_delay_us=1_500_000)
    with IoEngine(
        directory, 1 << 20, backend=faulty_disk(faults), ephemeral=True, slow_after_s=0.2
    ) as engine:
        extents = [engine.allocate(4096) for _ in range(3)]
        for extent in extents:
            engine.write(extent, arena.array[:4096])
        engine.wait_all()
    assert "slow disk: the write of Extent(id=" in caplog.text
    assert "overspill.store+" in caplog.text


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    print(faults_of(wanted))
    with tempfile.TemporaryDirectory() as folder:
        print(Scenario(wanted, Path(folder)).run())
