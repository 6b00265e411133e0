"""Short measurements of one rate each, each bounded in time and to some 112 MiB of memory."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..io_engine import Extent, IoEngine, IoStats, Lease, Ticket
from ..io_engine.file_ranges import MOST_THREADS, FilePart, FileRanges, RangeReader

log = logging.getLogger("overspill")

MIB = 1 << 20
DISK_BYTES = 96 * MIB
DISK_PIECE_BYTES = 16 * MIB
LINK_BYTES = 64 * MIB
FILE_BYTES = 64 * MIB
DRAM_BYTES = 48 * MIB  # twice this, source and target, is beyond most caches
SMALL_PIECE_BYTES = MIB // 4
FAST_S, SLOW_S = 0.01, 0.2  # for a small piece: 25 MB/s, 1.3 MB/s
MATRIX = 1024


@dataclass(frozen=True)
class Link:
    """Rates of the link between host and device, from page-locked host memory and from any."""

    in_bytes_s: float
    out_bytes_s: float
    in_pageable_bytes_s: float
    out_pageable_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second read, written, and both added up while both go on; and bytes per second
    that could be moved if all of compute's time went into it."""

    read_bytes_s: float
    write_bytes_s: float
    both_bytes_s: float
    cpu_bytes_s: float


_LARGER = 8  # times MATRIX


def best_s(run: Callable[[], object], limit_s: float) -> float:
    """Return the least time of ``run`` in seconds over repeated runs within ``limit_s``.

    There are at least two runs, and the first is not counted, unless it alone exceeds the limit.
    The least time is used because other work on the machine can only add time.
    """
    started = time.perf_counter()
    deadline = started + limit_s
    run()
    first_s = time.perf_counter() - started
    if first_s >= limit_s:
        return first_s
    times: list[float] = []
    while not times or time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def disk(
    directories: Sequence[str | os.PathLike[str]], limit_s: float, *, beside_compute: bool = False
) -> DiskRates | None:
    """Rates of the I/O engine, in a store that vanishes.

    The cost to compute is measured with ``beside_compute``; without it, the processor time of this
    process is taken for it.

    Writes over blocks that have been written before, as training does: the first write of a block
    costs more on most file systems.  A slow disk is given fewer and smaller pieces, not more time
    (one that moves 0.2 MB/s still takes less than ten seconds), and a full one is not measured:
    ``None``.
    """
    pieces = min(DISK_BYTES, _free_bytes(directories) // 2) // DISK_PIECE_BYTES
    if pieces < 2:
        return None
    total = pieces * DISK_PIECE_BYTES
    with (
        IoEngine([Path(d) for d in directories], total + MIB, ephemeral=True) as io,
        io.buffer(total) as memory,
    ):
        memory.array[:] = 1
        piece = _piece_bytes(io, memory)
        extents = [io.allocate(piece) for _ in range(pieces)]
        extents = extents[: _first_writes(io, extents, memory, limit_s / 9)]
        nbytes = len(extents) * piece
        io.flush()
        busy_before, moved_before = time.process_time(), io.stats
        written_s = best_s(lambda: _all(io.write, extents, memory), limit_s / 4)
        read_s = best_s(lambda: _all(io.read, extents, memory), limit_s / 4)
        busy_s, moved = time.process_time() - busy_before, io.stats
        both_s = written_s / 2 + read_s / 2
        if len(extents) > 1:
            both_s = best_s(lambda: _both(io, extents, memory), limit_s / 4)
        cpu_bytes_s = _moved_bytes(moved, moved_before) / max(busy_s, 1e-6)
        if beside_compute:
            lost = share_lost(lambda: _both(io, extents, memory), limit_s / 2)
            cpu_bytes_s = min(cpu_bytes_s, nbytes / both_s / lost) if lost else cpu_bytes_s
    return DiskRates(nbytes / read_s, nbytes / written_s, nbytes / both_s, cpu_bytes_s)


def share_lost(move: Callable[[], object], limit_s: float) -> float:
    """Return the share of the time of matrix products on all processors that is lost while another
    thread repeats ``move``.

    That is more than the processor time of the moves: interrupts, caches and the memory's bandwidth
    are in it, and the threads of a product wait for the last of them.  The median of three pairs.
    """
    left = torch.ones(MATRIX, MATRIX)

    def products() -> float:
        started, count = time.perf_counter(), 0
        while time.perf_counter() < started + limit_s / 6:
            torch.mm(left, left)
            count += 1
        return count / (time.perf_counter() - started)

    def repeat() -> None:
        while not stop.is_set():
            move()

    shares = []
    products()
    for _ in range(3):
        alone, stop = products(), threading.Event()
        thread = threading.Thread(target=repeat, name="overspill-measure")
        thread.start()
        try:
            shares.append(1 - products() / alone)
        finally:
            stop.set()
            thread.join()
    return max(0.0, sorted(shares)[1])


def _piece_bytes(io: IoEngine, memory: Lease) -> int:
    """How much to move at a time, from how long the second write of a small extent takes."""
    extent = io.allocate(SMALL_PIECE_BYTES)
    times = []
    for _ in range(2):
        started = time.perf_counter()
        io.write(extent, memory.array[:SMALL_PIECE_BYTES]).wait()
        times.append(time.perf_counter() - started)
        if times[0] > SLOW_S:
            break
    io.free(extent)
    if min(times) < FAST_S:
        return DISK_PIECE_BYTES
    return MIB if min(times) < SLOW_S else SMALL_PIECE_BYTES


def _moved_bytes(after: IoStats, before: IoStats) -> int:
    return after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written


def _part(memory: Lease, number: int, extent: Extent) -> NDArray[np.uint8]:
    return memory.array[number * extent.nbytes : (number + 1) * extent.nbytes]


def _both(io: IoEngine, extents: Sequence[Extent], memory: Lease) -> None:
    """Reads the one half of the extents while it writes the other."""
    tickets = []
    for number, extent in enumerate(extents):
        start = io.read if number % 2 else io.write
        tickets.append(start(extent, _part(memory, number, extent)))
    for ticket in tickets:
        ticket.wait()


def _free_bytes(directories: Sequence[str | os.PathLike[str]]) -> int:
    """Free disk space; where it cannot be told, the I/O engine will say why."""
    try:
        return min(shutil.disk_usage(folder).free for folder in directories)
    except OSError:
        return 2 * DISK_BYTES


def _first_writes(io: IoEngine, extents: Sequence[Extent], memory: Lease, limit_s: float) -> int:
    """Writes extents one by one; returns how many were written within the limit, at least 1."""
    deadline = time.perf_counter() + limit_s
    for count, extent in enumerate(extents, start=1):
        io.write(extent, _part(memory, 0, extent)).wait()
        if time.perf_counter() > deadline:
            return count
    return len(extents)


def _all(start: Callable[..., Ticket], extents: Sequence[Extent], memory: Lease) -> None:
    tickets = []
    for number, extent in enumerate(extents):
        tickets.append(start(extent, _part(memory, number, extent)))
    for ticket in tickets:
        ticket.wait()


def file(path: Path, limit_s: float) -> float | None:
    """Bytes per second read from a file that weights are read from in place; ``None`` for one that
    is too small to tell."""
    nbytes = min(path.stat().st_size, FILE_BYTES)
    if nbytes < FILE_BYTES // 16:
        return None
    buffer = np.empty(nbytes, np.uint8)
    with closing(RangeReader([path], checksum=False, threads=MOST_THREADS)) as reader:
        ranges = FileRanges(0, nbytes, (FilePart(0, 0, nbytes, 0),))
        return nbytes / best_s(lambda: reader.read(ranges, buffer).wait(), limit_s)


def link(device: torch.device, limit_s: float) -> Link:
    """Measure copies between host memory and a device.

    If no memory can be page-locked, both pairs of rates are those of pageable memory.
    """

    def copied_s(dst: torch.Tensor, src: torch.Tensor) -> float:
        def run() -> None:
            dst.copy_(src, non_blocking=True)
            torch.accelerator.synchronize(device)

        return best_s(run, limit_s / 5)

    loose = torch.ones(LINK_BYTES, dtype=torch.uint8, device="cpu")
    try:
        host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        log.info("overspill: measuring copies of pageable memory: %s", error)
        host = loose
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    latency_s = copied_s(there[:64], host[:64])
    pairs = ((there, host), (host, there), (there, loose), (loose, there))
    in_s, out_s, loose_in_s, loose_out_s = (copied_s(dst, src) for dst, src in pairs)
    return Link(
        LINK_BYTES / in_s, LINK_BYTES / out_s, LINK_BYTES / loose_in_s, LINK_BYTES / loose_out_s,
        latency_s,
    )  # fmt: skip


def memory(device: torch.device, limit_s: float) -> float:
    """Bytes per second read and written by a copy in a device's memory, the two added up."""
    src = torch.ones(DRAM_BYTES, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)

    def run() -> None:
        dst.copy_(src)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return 2 * DRAM_BYTES / best_s(run, limit_s)


def flops(device: torch.device, dtype: torch.dtype, limit_s: float) -> float:
    """Floating-point operations per second of a matrix product: on a device of its own a large one,
    unless a small one has shown that this would take long."""

    def product_s(side: int) -> float:
        left = torch.ones(side, side, dtype=dtype, device=device)

        def run() -> None:
            torch.mm(left, left)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

        return best_s(run, limit_s)

    side, seconds = MATRIX, product_s(MATRIX)
    if device.type != "cpu" and seconds * _LARGER**3 < 10 * limit_s:
        side, seconds = _LARGER * MATRIX, product_s(_LARGER * MATRIX)
    return 2 * side**3 / seconds
