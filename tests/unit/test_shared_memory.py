"""Host memory that several processes map."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import OffloadError, allocate_host
from overspill.io_engine.shared_memory import SharedAddress, SharedMemory
from tests.forked import CONTEXT
from tests.patience import WAIT_S

MIB = 1 << 20
SHARED = 3 * MIB


def mapped_bytes(figure: str) -> int:
    """``Rss`` or ``Pss`` of all mappings of shared memory in this process."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counts = "/memfd:overspill" in line
        elif counts and first == f"{figure}:":
            total += int(rest[0]) << 10
    return total


def second_process(address: SharedAddress, pipe: Connection) -> None:
    opened = SharedMemory.open(address, [4, 7])
    with allocate_host(5 * MIB, populate=False) as lease:
        opened.map_over(lease, SHARED, "a")
        opened.close()
        lease.populate()
        seen = lease.array[:SHARED].copy()
        lease.array[SHARED - 1] = 9  # seen there
        lease.array[SHARED:] = 8  # not seen
        pipe.send((opened.first, seen, mapped_bytes("Rss"), mapped_bytes("Pss")))
        pipe.recv()


def test_processes_see_the_same_bytes_and_hold_them_once() -> None:
    first = SharedMemory.create([4, 7])
    assert first.first and first.members == (4, 7)
    here, there = CONTEXT.Pipe()
    with allocate_host(4 * MIB, populate=False) as lease:
        first.map_over(lease, SHARED, "a")
        lease.populate()
        assert not lease.array.any()
        lease.array[:SHARED] = np.arange(SHARED, dtype=np.uint32).astype(np.uint8)
        process = CONTEXT.Process(target=second_process, args=(first.address, there))
        process.start()
        try:
            assert here.poll(WAIT_S)
            is_first, seen, rss, pss = here.recv()
            assert not is_first and lease.array[SHARED - 1] == 9
            lease.array[SHARED - 1] = seen[-1]
            assert np.array_equal(seen, lease.array[:SHARED]) and not lease.array[SHARED:].any()
            assert rss == SHARED and pss == SHARED // 2
            here.send(None)
        finally:
            process.join(WAIT_S)
        assert process.exitcode == 0
        assert mapped_bytes("Pss") == SHARED  # the other one has ended
    first.close()
    assert not mapped_bytes("Rss")


def test_a_forked_child_does_not_have_them() -> None:
    memory = SharedMemory.create([0])
    with allocate_host(4 * MIB) as lease:
        memory.map_over(lease, SHARED, "a")
        lease.array[:] = 1
        child = os.fork()
        if not child:
            os._exit(int(mapped_bytes("Rss") > 0))
        assert os.waitpid(child, 0)[1] == 0


def test_other_contents_are_refused() -> None:
    """Else one process would take the bytes of another for something that they are not."""
    first = SharedMemory.create([0, 1])
    second = SharedMemory.open(first.address, [0, 1])
    with allocate_host(4 * MIB, populate=False) as lease:
        first.map_over(lease, SHARED, "a")
    for nbytes, contents in (SHARED, "b"), (2 * MIB, "a"), (4 * MIB, "a"):
        with (
            allocate_host(4 * MIB, populate=False) as lease,
            pytest.raises(OffloadError, match="placed them differently"),
        ):
            second.map_over(lease, nbytes, contents)
    with allocate_host(4 * MIB, populate=False) as lease:
        second.map_over(lease, SHARED, "a")


def test_an_address_of_another_file_is_refused() -> None:
    first, other = SharedMemory.create([0, 1]), SharedMemory.create([0, 1])
    with pytest.raises(OSError):
        SharedMemory.open(first.address._replace(inode=other.address.inode), [0, 1])
    with pytest.raises(OSError):
        SharedMemory.open(first.address._replace(descriptor=1 << 20), [0, 1])
    descriptor = first.address.descriptor
    first.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_released_lease_is_refused() -> None:
    memory, lease = SharedMemory.create([0]), allocate_host(4 * MIB)
    lease.release()
    with pytest.raises(OffloadError, match="released"):
        memory.map_over(lease, SHARED, "a")
