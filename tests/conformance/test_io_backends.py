"""One suite over every way to move bytes: what is written is read, in order and at any size."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import IoEngine, IoError, OffloadError, Ticket, allocate_host
from tests.io_parts import MIB, Open, fill
from tests.patience import WAIT_S

SIZES = [1, 4095, 4096, 4097, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 300_000, MIB]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read(open_engine: Open, nbytes: int, checksum: bool) -> None:
    engine = open_engine(checksum=checksum)
    extent = engine.allocate(nbytes)
    with engine.buffer(nbytes) as buffer:
        want = fill(buffer, nbytes)
        engine.write(extent, buffer).wait(WAIT_S)
        buffer.array[:] = 0
        ticket = engine.read(extent, buffer)
        ticket.wait(WAIT_S)
        assert np.array_equal(buffer.array, want)
        assert ticket.nbytes == nbytes and 0 < ticket.started_ns <= ticket.finished_ns
    with engine.buffer(extent.padded_bytes) as padded:
        engine.read(extent, padded).wait(WAIT_S)
        assert np.array_equal(padded.array[:nbytes], want)


def test_arrays_and_memoryviews_serve_as_buffers(open_engine: Open) -> None:
    engine = open_engine()
    extent = engine.allocate(8192)
    with engine.buffer(4 * 8192) as arena:
        want = fill(arena, 3)[8192:16384]
        engine.write(extent, arena.array[8192:16384]).wait(WAIT_S)
        engine.read(extent, memoryview(arena.array)[16384:24576]).wait(WAIT_S)
        assert np.array_equal(arena.array[16384:24576], want)


def test_many_at_once_from_many_threads(open_engine: Open) -> None:
    engine = open_engine(16 * MIB)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = np.random.default_rng(number)
            extents = [engine.allocate(int(rng.integers(1, 200_000))) for _ in range(8)]
            leases = [engine.buffer(extent.nbytes) for extent in extents]
            wants = [fill(lease, 100 * number + k) for k, lease in enumerate(leases)]
            for ticket in [engine.write(e, x) for e, x in zip(extents, leases, strict=True)]:
                ticket.wait(WAIT_S)
            for lease in leases:
                lease.array[:] = 0
            for ticket in [engine.read(e, x) for e, x in zip(extents, leases, strict=True)]:
                ticket.wait(WAIT_S)
            for lease, want in zip(leases, wants, strict=True):
                assert np.array_equal(lease.array, want)
                lease.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_requests_to_one_extent_keep_their_order(open_engine: Open) -> None:
    engine = open_engine(queue_depth=2)
    extent = engine.allocate(500_000)
    with engine.buffer(500_000) as first, engine.buffer(500_000) as second:
        wants = [fill(first, 1), fill(second, 2)]
        with engine.buffer(500_000) as early, engine.buffer(500_000) as late:
            engine.write(extent, first)
            engine.read(extent, early)
            engine.write(extent, second)
            engine.read(extent, late, urgent=True)
            engine.wait_all()
            assert np.array_equal(early.array, wants[0])
            assert np.array_equal(late.array, wants[1])


def test_urgent_requests_overtake(open_engine: Open) -> None:
    engine = open_engine(4 * MIB, block_bytes=4096, queue_depth=1)
    ended: list[str] = []
    extents = [engine.allocate(512 << 10) for _ in range(5)]
    with engine.buffer(512 << 10) as buffer:
        for extent in extents:
            engine.write(extent, buffer).wait(WAIT_S)
        names = ["a", "b", "c", "d"]
        for name, extent in zip(names, extents, strict=False):
            engine.read(extent, buffer, on_done=lambda _, name=name: ended.append(name))
        engine.read(extents[4], buffer, urgent=True, on_done=lambda _: ended.append("urgent"))
        engine.wait_all()
    assert ended.index("urgent") < ended.index("c")
    assert [name for name in ended if name != "urgent"] == names


def test_a_queued_request_can_be_hurried_or_taken_back(open_engine: Open) -> None:
    engine = open_engine(4 * MIB, block_bytes=4096, queue_depth=1)
    extents = [engine.allocate(512 << 10) for _ in range(4)]
    ended: list[int] = []
    with engine.buffer(512 << 10) as buffer:
        for extent in extents:
            engine.write(extent, buffer).wait(WAIT_S)
        tickets = [
            engine.read(extent, buffer, on_done=lambda ticket: ended.append(ticket.extent.id))
            for extent in extents
        ]
        tickets[3].hurry()
        assert tickets[2].cancel()
        engine.wait_all()
        assert ended.index(extents[3].id) < ended.index(extents[1].id)
        with pytest.raises(IoError, match="cancelled"):
            tickets[2].wait(WAIT_S)
        assert sorted(ended) == [extent.id for extent in extents]
        assert not tickets[0].cancel()
        engine.read(extents[2], buffer).wait(WAIT_S)


def test_a_request_that_waits_for_another_can_be_taken_back(open_engine: Open) -> None:
    engine = open_engine()
    extent = engine.allocate(MIB)
    with engine.buffer(MIB) as buffer, engine.buffer(MIB) as other:
        want = fill(buffer, 5)
        writes = [engine.write(extent, buffer) for _ in range(3)]
        doomed = engine.write(extent, other)
        last = engine.read(extent, other)
        taken = doomed.cancel()
        for ticket in (*writes, last):
            ticket.wait(WAIT_S)
        if taken:
            assert np.array_equal(other.array, want)
            with pytest.raises(IoError, match="cancelled"):
                doomed.wait(WAIT_S)


def test_on_done_is_called_once_on_the_engines_thread(open_engine: Open) -> None:
    engine = open_engine()
    extent = engine.allocate(100_000)
    calls: list[tuple[Ticket, str]] = []

    def note(ticket: Ticket) -> None:
        calls.append((ticket, threading.current_thread().name))

    with engine.buffer(100_000) as buffer:
        failing = engine.read(extent, buffer, on_done=note)
        engine.wait_all()
        assert isinstance(failing.error, OffloadError)
        good = engine.write(extent, buffer, on_done=note)
        engine.wait_all()
    assert calls == [(failing, "overspill-io"), (good, "overspill-io")]


def test_counters_of_the_kernel_agree(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(8 * MIB)
    if not all(file.direct for file in engine._files):
        pytest.skip("no direct I/O here")
    extent = engine.allocate(2 * MIB + 5000)
    with engine.buffer(extent.nbytes) as buffer:
        engine.write(extent, buffer).wait(WAIT_S)
        before, ours = kernel_counters(), engine.stats
        engine.write(extent, buffer).wait(WAIT_S)
        engine.read(extent, buffer).wait(WAIT_S)
        after, now = kernel_counters(), engine.stats
    moved = extent.padded_bytes
    assert now.bytes_read - ours.bytes_read == moved == after[0] - before[0]
    assert now.bytes_written - ours.bytes_written == moved == after[1] - before[1]


def kernel_counters() -> tuple[int, int]:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def test_memory_is_used_right_however_often_it_comes_and_goes(open_engine: Open) -> None:
    """Registered memory whose address is mapped anew must never take the place of the new one."""
    engine = open_engine()
    extent = engine.allocate(MIB)
    addresses = set()
    for value in range(40):
        with engine.buffer(MIB) as lease, allocate_host(MIB) as other:
            engine.register(other)
            addresses.add(lease.address)
            lease.array[:] = value
            engine.write(extent, lease).wait(WAIT_S)
            other.array[:] = 255
            engine.read(extent, other).wait(WAIT_S)
            assert (other.array == value).all()
    assert len(addresses) < 40, "no address came twice: the test shows nothing"
    lease = engine.buffer(MIB)
    engine.close()
    lease.release()


def test_stripes_over_two_directories(backend: object, tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with IoEngine(places, 8 * MIB, backend=backend, block_bytes=64 << 10) as engine:
        extent = engine.allocate(4 * MIB + 100)
        assert {piece.file for piece in extent.pieces} == {0, 1}
        with engine.buffer(extent.nbytes) as buffer:
            want = fill(buffer, 9)
            engine.write(extent, buffer).wait(WAIT_S)
            buffer.array[:] = 0
            engine.read(extent, buffer).wait(WAIT_S)
            assert np.array_equal(buffer.array, want)
        assert all(lane.bytes_read > 0 for lane in engine.stats.lanes)
