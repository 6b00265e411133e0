"""The link between host and device memory: the engine's copies beside PyTorch's own.

Copies wait in line, as in training: one alone tells its latency.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from overspill.io_engine import allocate_host
from overspill.movement.accelerators.make import Accelerator, CopyDone, make_accelerator

from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Arm, Call, run_interleaved

MIB = 1 << 20
IN_LINE_BYTES = 128 * MIB  # of all copies of one sample together, if one is not more


def _in_line(nbytes: int) -> int:
    return max(1, IN_LINE_BYTES // nbytes)


def _ignore(copy: CopyDone) -> None:
    return None


def _ours(accelerator: Accelerator, host: torch.Tensor, device: torch.Tensor) -> list[Call]:
    def copied(*, into: bool, out: bool) -> float:
        accelerator.synchronize()
        started = time.perf_counter()
        events = []
        half = host.numel() // 2
        for _ in range(_in_line(half)):
            if into:
                dst, src = device[:half], host[:half]
                events.append(accelerator.copy_in(dst, src, after=[], on_done=_ignore))
            if out:
                dst, src = host[half:], device[half:]
                events.append(accelerator.copy_out(dst, src, after=[], on_done=_ignore))
        for event in events:
            event.synchronize()
        return time.perf_counter() - started

    return [
        Call("copy_in", lambda: copied(into=True, out=False)),
        Call("copy_out", lambda: copied(into=False, out=True)),
        Call("both at once", lambda: copied(into=True, out=True)),
    ]


def _torch(accelerator: Accelerator, nbytes: int) -> Call:
    locked = torch.empty(nbytes, dtype=torch.uint8, pin_memory=accelerator.device.type != "cpu")
    there = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)

    def copied() -> float:
        accelerator.synchronize()
        started = time.perf_counter()
        for _ in range(_in_line(nbytes)):
            there.copy_(locked, non_blocking=True)
        accelerator.synchronize()
        return time.perf_counter() - started

    return Call("torch, in", copied)


def _compare(accelerator: Accelerator, nbytes: int, rounds: int) -> Comparison:
    lease = allocate_host(2 * nbytes)
    try:
        accelerator.page_lock(lease.address, lease.nbytes)
        host = torch.from_numpy(lease.array)[: 2 * nbytes]
        host.fill_(1)
        device = accelerator.allocate(2 * nbytes)
        calls: list[Arm] = [
            _torch(accelerator, nbytes),
            *_ours(accelerator, host, device),
        ]
        rows = run_interleaved(calls, rounds)
    finally:
        accelerator.close()
        lease.release()
    moved = nbytes * _in_line(nbytes)
    columns: list[Column] = [
        ("each way", lambda row: number(row.median_s and moved / row.median_s / 1e9, " GB/s")),
        ("time over torch", spread),
        ("others", others),
    ]
    title = f"{_in_line(nbytes)} copies of {nbytes // MIB} MiB in line, device '{accelerator.name}'"
    return Comparison(title, {"nbytes": nbytes, "rounds": rounds}, rows, columns)


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite on the GPU, or on ``sim`` without limits, which tells the cost of a copy."""
    device = "cuda" if torch.cuda.is_available() else "sim"
    sizes, rounds = ((1, 32), 10) if quick else ((1, 4, 16, 64, 256), 20)
    comparisons = [_compare(make_accelerator(device, None), n * MIB, rounds) for n in sizes]
    return outcome("copy", comparisons, folder)
