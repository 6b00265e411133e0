"""Measures how fast this machine is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..facts.rates import Rates, UpdateRate
from ..optim.bench import CPU, Case, device_update_rate, update_costs
from ..optim.kernels import threads_beside
from . import probes

MEASURE_S = 2.0  # all probes together take about this long
UPDATE_ROUNDS = 3
# So many for each thread that updates, within limits: more than its share of the caches.
THREAD_PARAMS, LEAST_PARAMS, MOST_PARAMS = 3_000_000, 6_000_000, 48_000_000


def measure(directories: Sequence[str | os.PathLike[str]], device: str | torch.device) -> Rates:
    """Measures links, disks and memory for about two seconds, leaving nothing behind.

    What processors do is measured by ``measure_update`` and ``measure_flops``.

    Args:
        directories: where the store will be.  Without any, or where less than 32 MiB is free, the
            disk rates are ``None``.
        device: of torch's, such as ``"cuda:0"``, or ``"sim"``; without a link of its own (``cpu``,
            ``sim``) the link's rates are ``None``.

    Raises:
        IoError: a directory is missing or cannot be written.
    """
    compute = compute_device(device)
    shared = str(device) == "cpu"  # compute and transfers share the processors
    disk = None
    if directories:
        disk = probes.disk(directories, MEASURE_S / 2, beside_compute=shared)
    link = probes.link(compute, MEASURE_S / 4) if compute.type != "cpu" else None
    return Rates(
        h2d_bytes_s=link.in_bytes_s if link else None,
        d2h_bytes_s=link.out_bytes_s if link else None,
        h2d_pageable_bytes_s=link.in_pageable_bytes_s if link else None,
        d2h_pageable_bytes_s=link.out_pageable_bytes_s if link else None,
        link_latency_s=link.latency_s if link else None,
        disk_read_bytes_s=disk.read_bytes_s if disk else None,
        disk_write_bytes_s=disk.write_bytes_s if disk else None,
        disk_both_bytes_s=disk.both_bytes_s if disk else None,
        disk_cpu_bytes_s=disk.cpu_bytes_s if disk else None,
        dram_bytes_s=probes.memory(CPU, MEASURE_S / 8),
        device_memory_bytes_s=probes.memory(compute, MEASURE_S / 8) if link else None,
    )


def measure_update(case: Case, device: str | torch.device) -> UpdateRate:
    """Measures one rule with its formats, for less than a second; also on a GPU, if that is
    the device."""
    compute, there = compute_device(device), None
    count = threads_beside(compute)
    numel = min(MOST_PARAMS, max(LEAST_PARAMS, count * THREAD_PARAMS))
    cost = update_costs(cases=[case], numel=numel, rounds=UPDATE_ROUNDS, count=count).of(case)
    if compute.type != "cpu":
        there = device_update_rate(case, compute, numel=numel, rounds=UPDATE_ROUNDS)
    return UpdateRate(cost.all_threads, cost.beside_traffic, there)


def measure_file(path: Path) -> float | None:
    """Bytes per second read from weight files, for less than a second; ``None``: too small."""
    found = path.glob("*.safetensors") if path.is_dir() else [path]
    files = [file for file in found if file.is_file()]  # a link may lead nowhere
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    return None if largest is None else probes.file(largest, MEASURE_S / 16)


def measure_flops(device: str | torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of matrix products in ``dtype``."""
    return probes.flops(compute_device(device), dtype, MEASURE_S / 8)


def compute_device(device: str | torch.device) -> torch.device:
    """Where products run: ``sim`` computes on the CPU."""
    return torch.device("cpu" if str(device) == "sim" else device)
