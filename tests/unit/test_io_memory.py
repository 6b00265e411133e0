"""Host memory for transfers, and checksums over it."""

from __future__ import annotations

import errno
import gc
import random
import re
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import IoEngine, OffloadError, allocate_host, buffers
from overspill.io_engine.backend import choose
from overspill.io_engine.native import NATIVE, crc32
from tests.patience import WAIT_S

MIB = 1 << 20


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1])


@pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_memory_is_aligned_zeroed_and_of_the_length(nbytes: int) -> None:
    with allocate_host(nbytes) as lease:
        assert lease.address % (2 * MIB) == 0
        assert lease.nbytes == nbytes and lease.array.shape == (nbytes,)
        assert lease.array.dtype == np.uint8 and not lease.array.any()
        lease.array[-1] = 5
        assert memoryview(lease.array)[-1] == 5


def test_memory_is_taken_at_once_and_returned_at_release_despite_views() -> None:
    before = resident_kib()
    lease = allocate_host(64 * MIB)
    assert resident_kib() - before >= 63 << 10
    view = lease.array[5:]
    lease.release()
    lease.release()
    assert resident_kib() - before <= 4 << 10
    assert view.shape == (64 * MIB - 5,)  # may be looked at, not into
    with pytest.raises(OffloadError, match="released"):
        _ = lease.array


@pytest.mark.parametrize("backend", ["uring", "threads", "aiofiles"])
def test_memory_that_is_released_too_early_lasts_as_long_as_its_transfers(
    backend: str, tmp_path: Path
) -> None:
    """As when an exception ends the block that has it."""
    try:
        choose(backend)
    except RuntimeError as error:
        pytest.skip(str(error))
    before = resident_kib()
    with IoEngine(tmp_path, 64 * MIB, backend=backend) as engine:
        extent = engine.allocate(32 * MIB)
        with pytest.raises(KeyError), engine.buffer(32 * MIB) as buffer:
            buffer.array[:] = 7
            ticket = engine.write(extent, buffer)
            raise KeyError
        ticket.wait(WAIT_S)
        with engine.buffer(32 * MIB) as buffer:
            engine.read(extent, buffer).wait(WAIT_S)
            assert (buffer.array == 7).all()
    assert resident_kib() - before <= 8 << 10


def test_memory_is_seen_alike_by_numpy_memoryview_and_torch() -> None:
    torch = pytest.importorskip("torch")
    with allocate_host(4096) as lease:
        tensor = torch.frombuffer(lease.view, dtype=torch.float32)
        tensor.fill_(1.0)
        assert tensor.data_ptr() == lease.address and tensor.numel() == 1024
        assert lease.view.nbytes == 4096 and not lease.view.readonly
        assert lease.array[:4].tolist() == [0, 0, 128, 63], "1.0 in fp32"
        del tensor
    with pytest.raises(OffloadError, match="has been released"):
        lease.view  # noqa: B018


def test_memory_not_populated_is_not_taken() -> None:
    before = resident_kib()
    with allocate_host(64 * MIB, populate=False):
        assert resident_kib() - before < 4 << 10


def test_parts_are_taken_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, the rest at the end too; and one that is refused is told."""
    monkeypatch.setattr(buffers, "POPULATED_BYTES", 4 * MIB)
    before = resident_kib()
    with allocate_host(66 * MIB):
        assert resident_kib() - before >= 66 << 10
    taken, populate = set(), buffers._Mapping._populate

    def refused(mapping: buffers._Mapping, start: int) -> int:
        taken.add(threading.get_ident())
        return errno.ENOMEM if start == 16 * MIB else populate(mapping, start)

    monkeypatch.setattr(buffers._Mapping, "_populate", refused)
    with pytest.raises(OffloadError, match="but less is free"):
        allocate_host(66 * MIB)
    assert threading.get_ident() not in taken
    gc.collect()
    assert resident_kib() - before <= 4 << 10, "what was taken is given back"


def test_a_dropped_lease_lives_as_long_as_its_views() -> None:
    before = resident_kib()
    view = allocate_host(32 * MIB).array[7:]
    gc.collect()
    view[:] = 3
    assert int(view[-1]) == 3
    del view
    gc.collect()
    assert resident_kib() - before <= 4 << 10


def test_more_memory_than_there_is() -> None:
    with pytest.raises(OffloadError, match="host memory"):
        allocate_host(1 << 62)
    with pytest.raises(ValueError, match="positive"):
        allocate_host(0)


def test_buffers_keep_to_their_limit(tmp_path: Path) -> None:
    with IoEngine(tmp_path, MIB, buffer_bytes=3 * MIB) as engine:
        first = engine.buffer(2 * MIB)
        with pytest.raises(OffloadError, match="1048576 of buffer_bytes=3145728 are free"):
            engine.buffer(2 * MIB)
        first.release()
        dropped = engine.buffer(2 * MIB)
        del dropped
        gc.collect()
        engine.buffer(3 * MIB).release()


def test_checksums_are_those_of_zlib() -> None:
    rng = random.Random(11)
    data = np.frombuffer(rng.randbytes(1 << 16), np.uint8)
    for _ in range(300):
        start = rng.randrange(0, 3000)
        part = data[start : start + rng.choice([0, 1, 15, 16, 17, 64, 129, 1024, 4096, 60_000])]
        assert crc32(part) == zlib.crc32(part.tobytes())


@pytest.mark.skipif(NATIVE is None, reason="no native extension")
def test_every_way_to_sum_agrees_with_zlib() -> None:
    assert NATIVE is not None
    rng = random.Random(12)
    data = np.frombuffer(rng.randbytes(1 << 14), np.uint8)
    base = data.__array_interface__["data"][0]
    for way in NATIVE.crc32_ways():
        for length in [*range(0, 1100, 7), 2048, 4096, 8192, 16000]:
            start, seed = rng.randrange(0, 300), rng.getrandbits(32)
            part = data[start : start + length].tobytes()
            found = NATIVE.crc32_by(way, base + start, len(part), seed)
            assert found == zlib.crc32(part, seed), f"{way}, {length} bytes"
    with pytest.raises(ValueError, match="this machine has"):
        NATIVE.crc32_by("slide rule", base, 1, 0)
