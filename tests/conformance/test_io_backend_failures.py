"""Over every way to move bytes: damage and misuse are errors, and an engine leaves nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import CorruptionError, IoEngine, IoError, OffloadError, Ticket
from tests.io_parts import MIB, Open, fill
from tests.patience import WAIT_S


def test_an_error_in_on_done_is_reported(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine()
    extent = engine.allocate(4096)

    def fail(ticket: Ticket) -> None:
        ticket.wait()

    def wait_for_another(ticket: Ticket) -> None:
        engine.wait_all()

    with engine.buffer(4096) as buffer:
        engine.write(extent, buffer, on_done=wait_for_another)
        with pytest.raises(RuntimeError, match="inside on_done"):
            engine.wait_all()
        assert "on_done" in caplog.text
        engine.write(extent, buffer, on_done=fail)  # it has ended: waiting is no error
        engine.wait_all()


def test_wait_all_raises_what_nobody_has_seen(open_engine: Open) -> None:
    engine = open_engine()
    extent = engine.allocate(4096)
    with engine.buffer(4096) as buffer:
        engine.read(extent, buffer)
        with pytest.raises(OffloadError, match="never been written"):
            engine.wait_all()
        engine.wait_all()
        with pytest.raises(OffloadError, match="never been written"):
            engine.read(extent, buffer).wait(WAIT_S)
        engine.wait_all()


def test_a_changed_byte_on_disk_is_an_error_and_others_stay_well(open_engine: Open) -> None:
    engine = open_engine()
    good, bad = engine.allocate(200_000), engine.allocate(200_000)
    with engine.buffer(200_000) as buffer:
        want = fill(buffer, 1)
        for extent in (good, bad):
            engine.write(extent, buffer).wait(WAIT_S)
        place = bad.pieces[0].offset + 70_000
        flip_bit(engine, place)
        with pytest.raises(CorruptionError) as caught:
            engine.read(bad, buffer).wait(WAIT_S)
        error = caught.value
        assert error.path.endswith("overspill.store") and error.expected != error.found
        assert error.offset <= place < error.offset + error.nbytes
        assert f"{error.expected:#010x}" in str(error) and str(error.offset) in str(error)
        engine.read(good, buffer).wait(WAIT_S)
        assert np.array_equal(buffer.array, want)
        engine.write(bad, buffer).wait(WAIT_S)
        engine.read(bad, buffer).wait(WAIT_S)
        assert engine.stats.failures == 1


def flip_bit(engine: IoEngine, place: int) -> None:
    with open(engine.stats.lanes[0].path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


def test_without_checksums_nothing_is_compared(open_engine: Open) -> None:
    engine = open_engine(checksum=False)
    extent = engine.allocate(8192)
    with engine.buffer(8192) as buffer:
        want = fill(buffer, 1)
        engine.write(extent, buffer).wait(WAIT_S)
        flip_bit(engine, extent.pieces[0].offset + 5000)
        engine.read(extent, buffer).wait(WAIT_S)
        assert np.flatnonzero(buffer.array != want).tolist() == [5000]


def test_a_truncated_file_is_an_error(open_engine: Open) -> None:
    engine = open_engine()
    extents = [engine.allocate(MIB) for _ in range(2)]
    with engine.buffer(MIB) as buffer:
        for extent in extents:
            engine.write(extent, buffer).wait(WAIT_S)
        os.truncate(engine.stats.lanes[0].path, extents[1].pieces[0].offset + 8192)
        engine.read(extents[0], buffer).wait(WAIT_S)
        with pytest.raises(IoError, match="it was truncated"):
            engine.read(extents[1], buffer).wait(WAIT_S)
        engine.write(extents[1], buffer).wait(WAIT_S)
        engine.read(extents[1], buffer).wait(WAIT_S)


def test_contents_do_not_outlive_their_extent(open_engine: Open) -> None:
    engine = open_engine(MIB)
    with engine.buffer(MIB) as buffer:
        extent = engine.allocate(MIB)
        ticket = engine.write(extent, buffer)
        with pytest.raises(IoError, match="0 of 1048576 are free"):
            engine.allocate(1)
        freed = False
        try:  # the write may be over by now
            engine.free(extent)
            freed = True
        except OffloadError as error:
            assert "in flight" in str(error)
        ticket.wait(WAIT_S)
        engine.wait_all()
        if not freed:
            engine.free(extent)
        again = engine.allocate(MIB)
        with pytest.raises(OffloadError, match="never been written"):
            engine.read(again, buffer).wait(WAIT_S)
        for stale in (extent,):
            with pytest.raises(ValueError, match="has been freed"):
                engine.read(stale, buffer)
            with pytest.raises(ValueError, match="has been freed"):
                engine.free(stale)


def test_a_buffer_that_does_not_fit_is_refused(open_engine: Open) -> None:
    engine = open_engine()
    extent = engine.allocate(10_000)
    with engine.buffer(1 << 16) as arena:
        for buffer in (arena.array[:9_999], arena.array[:10_001], arena.array[:16384]):
            with pytest.raises(ValueError, match="10000, or 12288"):
                engine.write(extent, buffer)
        with pytest.raises(ValueError, match="multiple of 4096"):
            engine.write(extent, arena.array[8:10_008])
        with pytest.raises(ValueError, match="flat uint8"):
            engine.write(extent, np.zeros(2500, np.float32))
        frozen = arena.array[:10_000].view()
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="writable"):
            engine.read(extent, frozen)
        engine.write(extent, frozen).wait(WAIT_S)


def test_close_lets_everything_end_and_leaves_nothing(open_engine: Open, tmp_path: Path) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    engine = open_engine()
    extents = [engine.allocate(MIB) for _ in range(4)]
    with engine.buffer(MIB) as buffer:
        tickets = [engine.write(extent, buffer) for extent in extents for _ in range(2)]
        engine.close()
        assert all(ticket.done() and ticket.error is None for ticket in tickets)
        engine.close()
        for call in (
            lambda: engine.write(extents[0], buffer),
            lambda: engine.allocate(1),
            engine.flush,
        ):
            with pytest.raises(OffloadError, match="closed"):
                call()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path) == []
    assert engine.stats.bytes_written == 8 * MIB


def test_a_dropped_engine_is_closed(open_engine: Open, backend: object, tmp_path: Path) -> None:
    engine = IoEngine(tmp_path, MIB, backend=backend)
    extent = engine.allocate(4096)
    with engine.buffer(4096) as buffer:
        ticket = engine.write(extent, buffer)
        del engine
        ticket.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.listdir(tmp_path) == []


def test_flush_tells_of_a_deleted_file(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    engine.flush()
    (tmp_path / "overspill.store").unlink()
    with pytest.raises(IoError, match="has been deleted"):
        engine.flush()
