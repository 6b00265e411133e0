"""How fast each directory is, tried out for a moment, so that stripes can follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from .backend import Backend, BackendFactory, Completion, Outcome, Segment, Tuning
from .buffers import Lease, allocate_host
from .errors import IoError
from .store_file import create_files
from .types import round_up

PROBE_BYTES = 64 << 20
_LONGEST_S = 60.0


def measured_rates(
    directories: Sequence[Path], tuning: Tuning, start: BackendFactory
) -> list[float]:
    """Bytes per second of each directory, half read and half written; each is tried alone.

    Raises:
        IoError: a directory cannot be used, or does not move 64 MiB within a minute.
    """
    nbytes = round_up(PROBE_BYTES, tuning.block_bytes)
    with allocate_host(nbytes) as memory:
        return [_rate(directory, tuning, start, memory) for directory in directories]


def _rate(directory: Path, tuning: Tuning, start: BackendFactory, memory: Lease) -> float:
    (file,) = create_files([directory], [memory.nbytes], ephemeral=True)
    ended = True
    try:
        backend = start([file.fd], tuning)
        try:
            _move(backend, directory, True, memory)  # the first write also makes the blocks
            begun = time.perf_counter()
            _move(backend, directory, True, memory)
            _move(backend, directory, False, memory)
            return 2 * memory.nbytes / (time.perf_counter() - begun)
        finally:
            ended = backend.close(_LONGEST_S)
    finally:
        file.close(keep_descriptor=not ended)


def _move(backend: Backend, directory: Path, write: bool, memory: Lease) -> None:
    backend.submit(1, write, False, [Segment(0, 0, memory.address, memory.nbytes, 0)])
    deadline = time.monotonic() + _LONGEST_S
    ended: list[Completion] = []
    while not ended and time.monotonic() < deadline:
        ended = backend.collect(1.0)
    if not ended or ended[0].outcome != Outcome.DONE:
        code = ended[0].error if ended else 0
        raise IoError(
            f"{directory}: cannot measure its speed, because moving {memory.nbytes} bytes failed "
            f"(error {code}); leave this directory out, or see the kernel log",
            path=str(directory),
            nbytes=memory.nbytes,
            errno=code,
        )
