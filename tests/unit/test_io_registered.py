"""Memory registered with a ring: forgotten at release, and never more than is allowed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from overspill.io_engine import IoEngine, allocate_host
from overspill.io_engine.backend import NativeBackend, Tuning, choose
from tests.patience import WAIT_S

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _needs_uring() -> None:
    try:
        choose("uring")
    except RuntimeError as error:
        pytest.skip(str(error))


def until(condition: Callable[[], bool]) -> bool:
    """The ring's own thread makes changes: waits for that."""
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def opened(tmp_path: Path) -> tuple[IoEngine, NativeBackend]:
    made: list[NativeBackend] = []

    def start(fds: Sequence[int], tuning: Tuning) -> NativeBackend:
        made.append(NativeBackend.start(fds, Tuning("uring", tuning.block_bytes, 8)))
        return made[-1]

    engine = IoEngine(tmp_path, 8 * MIB, backend=start, block_bytes=64 << 10)
    yield engine, made[0]
    engine.close()


def test_buffers_are_registered_as_long_as_they_live(
    opened: tuple[IoEngine, NativeBackend],
) -> None:
    engine, mover = opened
    buffer = engine.buffer(2 * MIB)
    if not until(lambda: mover.registered_bytes == 2 * MIB):
        pytest.skip("the kernel registers nothing here")
    with allocate_host(4 * MIB) as other:
        engine.register(other)
        assert until(lambda: mover.registered_bytes == 6 * MIB)
        extent = engine.allocate(2 * MIB)
        for half in (other.array[: 2 * MIB], other.array[2 * MIB :]):
            buffer.array[:] = 7
            engine.write(extent, buffer).wait(WAIT_S)
            engine.read(extent, half).wait(WAIT_S)
            assert (half == 7).all()
    assert mover.registered_bytes <= 2 * MIB, "forgotten once release() has returned"
    del buffer
    assert mover.registered_bytes == 0


def test_more_memory_than_there_are_places_works_all_the_same(
    opened: tuple[IoEngine, NativeBackend],
) -> None:
    engine, mover = opened
    extent = engine.allocate(65536)
    buffers = [engine.buffer(65536) for _ in range(80)]
    until(lambda: mover.registered_bytes == 64 * 65536)
    assert mover.registered_bytes <= 64 * 65536
    for value, buffer in enumerate(buffers):
        buffer.array[:] = value
        engine.write(extent, buffer).wait(WAIT_S)
        buffer.array[:] = 255
        engine.read(extent, buffer).wait(WAIT_S)
        assert (buffer.array == value).all()
        buffer.release()
    assert mover.registered_bytes == 0
    again = engine.buffer(65536)
    assert until(lambda: mover.registered_bytes == 65536) or mover.registered_bytes == 0
    again.release()


def test_a_limit_on_locked_memory_is_no_error() -> None:
    """Without the right to lock memory, transfers go on as without registration."""
    code = """
        import os, resource, sys
        from overspill.io_engine import IoEngine
        if os.getuid() == 0:
            os.chown(sys.argv[1], 65534, 65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        with IoEngine(sys.argv[1], 4 << 20, backend="uring") as engine:
            extent = engine.allocate(4 << 20)
            with engine.buffer(4 << 20) as buffer:
                buffer.array[:] = 5
                engine.write(extent, buffer).wait(300)
                buffer.array[:] = 0
                engine.read(extent, buffer).wait(300)
                print(bool((buffer.array == 5).all()))
    """
    # Not tmp_path: when root runs this as somebody else, its parents must be open to all.
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), place],
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
    assert done.stdout == "True\n", done.stderr
