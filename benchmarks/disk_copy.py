"""What a disk does when it reads and writes at once: a copy past the page cache."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 4 << 20
THREADS = 4  # each way: enough to keep a disk busy with blocks of this size
ALIGNED = 4096


def copy_s(source: Path, read_bytes: int, target: Path, written_bytes: int) -> float:
    """Seconds to read so many bytes of ``source`` while as many as said go to ``target``.

    ``target`` is new and preallocated, flushed within the time, and removed after it.  What is
    written is not what was read, so that neither side waits for the other.
    """
    from_fd = os.open(source, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    to_fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC)
    try:
        size = os.fstat(from_fd).st_size // BLOCK_BYTES * BLOCK_BYTES
        os.posix_fallocate(to_fd, 0, max(written_bytes, BLOCK_BYTES))
        started = time.perf_counter()
        workers = [
            *_spread(read_bytes, lambda at, data: os.preadv(from_fd, [data], at % size)),
            *_spread(written_bytes, lambda at, data: os.pwritev(to_fd, [data], at)),
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.fdatasync(to_fd)
        return time.perf_counter() - started
    finally:
        os.close(from_fd)
        os.close(to_fd)
        target.unlink()


def _spread(nbytes: int, move: Callable[[int, memoryview], int]) -> list[threading.Thread]:
    """Threads that move whole blocks of ``nbytes``, each every so manyth one."""

    def run(first: int) -> None:
        with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as data:
            for at in range(first * BLOCK_BYTES, nbytes, THREADS * BLOCK_BYTES):
                length = min(BLOCK_BYTES, nbytes - at) // ALIGNED * ALIGNED
                if length:
                    with data[:length] as part:
                        move(at, part)

    return [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
