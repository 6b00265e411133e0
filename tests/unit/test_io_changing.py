"""Writes from memory that others write to meanwhile: the file has what its checksums are of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import IoEngine
from overspill.io_engine.bench import available_backends
from overspill.io_engine.buffers import Lease

MIB = 1 << 20
BACKENDS = [*available_backends(), *({"aiofiles"} - set(available_backends()))]


@contextmanager
def _changing(memory: Lease) -> Iterator[None]:
    """A thread turns all its bits round, over and over."""
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            np.invert(memory.array, out=memory.array)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_is_what_was_summed(backend: str, tmp_path: Path) -> None:
    """Also beside writes and reads of memory that nobody changes, on two lanes."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    nbytes = 9 * MIB + 4096 + 100  # blocks, a short one, and a tail
    with (
        IoEngine(folders, 8 * nbytes, backend=backend, block_bytes=MIB, ephemeral=True) as io,
        io.buffer(nbytes) as changes, io.buffer(nbytes) as still, io.buffer(nbytes) as back,
    ):  # fmt: skip
        still.array[:] = np.arange(nbytes, dtype=np.uint64).view(np.uint8)[:nbytes]
        extents = [io.allocate(nbytes) for _ in range(3)]
        beside = io.allocate(nbytes)
        for _ in range(6):
            with _changing(changes):
                tickets = [io.write(extent, changes, changing=True) for extent in extents]
                tickets.append(io.write(beside, still))
                for ticket in tickets:
                    ticket.wait()
            for extent in extents:
                io.read(extent, back).wait()  # raises where a checksum does not hold
            io.read(beside, back).wait()
            assert np.array_equal(back.array, still.array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_changes_is_written_as_it_is(backend: str, tmp_path: Path) -> None:
    nbytes = 5 * MIB
    with (
        IoEngine([tmp_path], 4 * nbytes, backend=backend, block_bytes=MIB, ephemeral=True) as io,
        io.buffer(nbytes) as memory, io.buffer(nbytes) as back,
    ):  # fmt: skip
        memory.array[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        kept = memory.array.copy()
        extent = io.allocate(nbytes)
        io.write(extent, memory, changing=True).wait()
        assert io.holds(extent, memory.array)
        memory.array[-1] ^= 1
        assert not io.holds(extent, memory.array)
        io.read(extent, back).wait()
        assert np.array_equal(back.array, kept)
