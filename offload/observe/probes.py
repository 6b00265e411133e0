"""Short measurements of one rate each, each bounded in time and to some 112 MiB of memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..io_engine import Extent, IoEngine, Lease, Ticket
from ..optim import rule_for

MIB = 1 << 20
DISK_BYTES = 96 * MIB
DISK_PIECE_BYTES = 16 * MIB
LINK_BYTES = 64 * MIB
DRAM_BYTES = 48 * MIB  # twice this, source and target, is beyond most caches
UPDATE_PARAMS = 8 << 20  # 14 bytes each
MATRIX = 1024


@dataclass(frozen=True)
class Link:
    """Rates of the link between host and device."""

    in_bytes_s: float
    out_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class Disk:
    """Bytes per second read, written, and both added up while both go on."""

    read_bytes_s: float
    write_bytes_s: float
    both_bytes_s: float


def best_s(run: Callable[[], object], limit_s: float) -> float:
    """The least time of ``run`` in seconds, over as many runs as fit into ``limit_s``, at least 2.

    The first run is not counted.  The least, since whatever else the machine does only adds.
    """
    deadline = time.perf_counter() + limit_s
    run()
    times: list[float] = []
    while not times or time.perf_counter() < deadline:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def disk(directories: Sequence[str | os.PathLike[str]], limit_s: float) -> Disk | None:
    """Rates of the I/O engine, in a store that vanishes.

    Writes over blocks that have been written before, as training does: the first write of a block
    costs more on most file systems.  A slow disk is given fewer bytes, not more time, and a full
    one is not measured: ``None``.
    """
    pieces = min(DISK_BYTES, _free_bytes(directories) // 2) // DISK_PIECE_BYTES
    if pieces < 2:
        return None
    total = pieces * DISK_PIECE_BYTES
    with (
        IoEngine([Path(d) for d in directories], total, ephemeral=True) as io,
        io.buffer(total) as memory,
    ):
        memory.array[:] = 1
        extents = [io.allocate(DISK_PIECE_BYTES) for _ in range(pieces)]
        extents = extents[: _first_writes(io, extents, memory, limit_s / 9)]
        io.flush()
        written_s = best_s(lambda: _all(io.write, extents, memory), limit_s / 4)
        read_s = best_s(lambda: _all(io.read, extents, memory), limit_s / 4)
        both_s = best_s(lambda: _both(io, extents, memory), limit_s / 4)
    nbytes = len(extents) * DISK_PIECE_BYTES
    return Disk(nbytes / read_s, nbytes / written_s, nbytes / both_s)


def _both(io: IoEngine, extents: Sequence[Extent], memory: Lease) -> None:
    """Reads the one half of the extents while it writes the other."""
    tickets = []
    for number, extent in enumerate(extents):
        begin = number * DISK_PIECE_BYTES
        start = io.read if number % 2 else io.write
        tickets.append(start(extent, memory.array[begin : begin + DISK_PIECE_BYTES]))
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
        io.write(extent, memory.array[:DISK_PIECE_BYTES]).wait()
        if time.perf_counter() > deadline:
            return count
    return len(extents)


def _all(start: Callable[..., Ticket], extents: Sequence[Extent], memory: Lease) -> None:
    tickets = []
    for number, extent in enumerate(extents):
        begin = number * DISK_PIECE_BYTES
        tickets.append(start(extent, memory.array[begin : begin + DISK_PIECE_BYTES]))
    for ticket in tickets:
        ticket.wait()


def link(device: torch.device, limit_s: float) -> Link:
    """Copies between page-locked host memory and a GPU."""

    def copied_s(dst: torch.Tensor, src: torch.Tensor) -> float:
        def run() -> None:
            dst.copy_(src, non_blocking=True)
            torch.cuda.synchronize(device)

        return best_s(run, limit_s / 3)

    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    latency_s = copied_s(there[:64], host[:64])
    in_s, out_s = copied_s(there, host), copied_s(host, there)
    return Link(LINK_BYTES / in_s, LINK_BYTES / out_s, latency_s)


def update(limit_s: float) -> float:
    """Parameters per second that AdamW updates: bf16 gradients and weights, split master."""
    rule = rule_for(torch.optim.AdamW([torch.zeros(1)]))
    grad = torch.full((UPDATE_PARAMS,), 1e-3, dtype=torch.bfloat16)
    weight = torch.ones(UPDATE_PARAMS, dtype=torch.bfloat16)
    state = {
        field.name: torch.zeros(UPDATE_PARAMS, dtype=field.dtype)
        for field in rule.state_fields(torch.bfloat16, "split", "fp32")
    }
    scalars = rule.scalars(torch.optim.AdamW([torch.zeros(1)]).param_groups[0], 1, 1.0)
    return UPDATE_PARAMS / best_s(lambda: rule.update(grad, weight, state, scalars), limit_s)


def dram(limit_s: float) -> float:
    """Bytes per second read and written by a copy in host memory, the two added up."""
    src = torch.ones(DRAM_BYTES, dtype=torch.uint8)
    dst = torch.empty_like(src)
    return 2 * DRAM_BYTES / best_s(lambda: dst.copy_(src), limit_s)


def flops(device: torch.device, limit_s: float) -> float:
    """Floating-point operations per second of a matrix product: bf16 on a GPU, fp32 on a CPU."""
    gpu = device.type != "cpu"
    side = 8 * MATRIX if gpu else MATRIX
    left = torch.ones(side, side, dtype=torch.bfloat16 if gpu else torch.float32, device=device)

    def run() -> None:
        torch.mm(left, left)
        if gpu:
            torch.cuda.synchronize(device)

    return 2 * side**3 / best_s(run, limit_s)
