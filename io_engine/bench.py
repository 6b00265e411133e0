"""Tries settings on a directory: rates, CPU, latencies; picks the best, and remembers it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .backend import Tuning, choose
from .buffers import Lease
from .engine import IoEngine
from .settings import remember
from .types import Extent, round_up

Mode = Literal["read", "write", "both"]
MODES: tuple[Mode, ...] = ("read", "write", "both")

MIB = 1 << 20
DEFAULT_BLOCKS = (128 << 10, MIB, 4 * MIB)
DEFAULT_DEPTHS = (4, 16, 32)
_PARTS = 16  # extents; the more, the longer a request's turn is hidden behind others


@dataclass(frozen=True)
class Measurement:
    """One mode under one setting: medians over the rounds.

    ``bytes_s``: bytes moved per second, reads and writes together.  ``cpu_s_per_gb``: core-seconds
    of this process per 1e9 bytes.  ``latency_*_s``: of single transfers of one block, up to a fifth
    too low.
    """

    mode: Mode
    tuning: Tuning
    bytes_s: float
    cpu_s_per_gb: float
    latency_median_s: float
    latency_p99_s: float
    latency_max_s: float


@dataclass(frozen=True)
class BenchReport:
    """All that was tried on a directory.  ``kept_in``: where ``best`` was remembered, if it was."""

    directory: str
    nbytes: int
    checksum: bool
    measurements: tuple[Measurement, ...]
    best: Tuning
    kept_in: str | None


def bench(
    directory: str | os.PathLike[str],
    *,
    nbytes: int = 256 * MIB,
    backends: Sequence[str] | None = None,
    block_sizes: Sequence[int] = DEFAULT_BLOCKS,
    queue_depths: Sequence[int] = DEFAULT_DEPTHS,
    rounds: int = 3,
    checksum: bool = True,
    keep: bool = True,
    progress: Callable[[Measurement], None] | None = None,
) -> BenchReport:
    """Measure reads, writes, and both at once under every setting; ``IoEngine`` uses the best.

    Args:
        directory: the directory to measure.
        nbytes: size of the store, and of the memory for it; more than the device's own cache gives
            more realistic figures.
        backends: which to measure; ``None``: all that work here.
        block_sizes, queue_depths: bytes of one transfer, and transfers in flight.
        rounds: measured passes per mode; the median counts.
        checksum: include the cost of checksums, as in normal use.
        keep: remember the best setting for this directory.
        progress: called with each measurement.

    Raises:
        IoError: the directory cannot be used; need, have and remedy are named.
        ValueError: an argument is invalid.
    """
    if rounds < 1 or not block_sizes or not queue_depths:
        raise ValueError("a bench needs at least one round, one block size and one queue depth")
    place = Path(directory)
    names = list(backends) if backends is not None else available_backends()
    measurements: list[Measurement] = []
    for tuning in _settings(names, block_sizes, queue_depths):
        for measurement in _try(place, nbytes, tuning, rounds, checksum):
            measurements.append(measurement)
            if progress is not None:
                progress(measurement)
    best = pick(measurements)
    kept = remember(place, best) if keep else None
    return BenchReport(
        str(place), nbytes, checksum, tuple(measurements), best, str(kept) if kept else None
    )


def available_backends() -> list[str]:
    """The backends that work here, fastest kind first; the pure one only where it is alone."""
    names = []
    for name in ("uring", "threads"):
        try:
            choose(name)
        except RuntimeError:
            continue
        names.append(name)
    return names or ["aiofiles"]


def pick(measurements: Sequence[Measurement]) -> Tuning:
    """The setting to use: within 3 % of the best rate, the one that costs least CPU.

    The rate of a setting is the harmonic mean over its modes: what a job moves that does as much
    of each.
    """
    rates: dict[Tuning, float] = {}
    cpu: dict[Tuning, float] = {}
    for tuning in {m.tuning: None for m in measurements}:
        mine = [m for m in measurements if m.tuning == tuning]
        rates[tuning] = statistics.harmonic_mean([m.bytes_s for m in mine])
        cpu[tuning] = statistics.mean(m.cpu_s_per_gb for m in mine)
    good = [tuning for tuning, rate in rates.items() if rate >= 0.97 * max(rates.values())]
    return min(good, key=lambda tuning: cpu[tuning])


def _settings(
    names: Sequence[str], block_sizes: Sequence[int], depths: Sequence[int]
) -> Iterator[Tuning]:
    for name in names:
        for block in block_sizes:
            for depth in depths:
                # Threads beyond 16 only switch; large blocks need no deep queue.
                if name != "uring" and depth > 16:
                    continue
                yield Tuning(name, block, depth)


def _try(
    place: Path, nbytes: int, tuning: Tuning, rounds: int, checksum: bool
) -> Iterator[Measurement]:
    part = round_up(max(nbytes // _PARTS, 1), tuning.block_bytes)
    with IoEngine(
        place, part * _PARTS, backend=tuning.backend, block_bytes=tuning.block_bytes,
        queue_depth=tuning.queue_depth, checksum=checksum, ephemeral=True,
    ) as engine:  # fmt: skip
        extents = [engine.allocate(part) for _ in range(_PARTS)]
        with engine.buffer(part * _PARTS) as memory:
            memory.array[:] = 0x5A
            _move("write", engine, extents, memory)  # the first write also makes the blocks
            for mode in MODES:
                yield _measure(mode, engine, extents, memory, rounds)


def _measure(
    mode: Mode, engine: IoEngine, extents: Sequence[Extent], memory: Lease, rounds: int
) -> Measurement:
    before = engine.latencies()
    rates, cpus = [], []
    for _ in range(rounds):
        cpu_s, begun = time.process_time(), time.perf_counter()
        _move(mode, engine, extents, memory)
        rates.append(memory.nbytes / (time.perf_counter() - begun))
        cpus.append((time.process_time() - cpu_s) / (memory.nbytes / 1e9))
    steps = [now - then for now, then in zip(engine.latencies(), before, strict=True)]
    return Measurement(
        mode,
        engine.tuning,
        statistics.median(rates),
        statistics.median(cpus),
        quantile(steps, 0.5),
        quantile(steps, 0.99),
        quantile(steps, 1.0),
    )


def quantile(steps: Sequence[int], share: float) -> float:
    """Seconds that ``share`` of the transfers did not exceed, from counts as the engine keeps them.

    ``steps[k]`` counts those of ``2**(k/4)`` ns and more, but less than the next step's.
    """
    wanted, seen = share * sum(steps), 0
    for step, count in enumerate(steps):
        seen += count
        if count and seen >= wanted:
            return float(2 ** (step / 4)) * 1e-9
    return 0.0


def _move(mode: Mode, engine: IoEngine, extents: Sequence[Extent], memory: Lease) -> None:
    part = extents[0].nbytes
    half = len(extents) // 2
    for index, extent in enumerate(extents):
        # Both at once: reads of one half between writes of the other.
        if mode == "both":
            index = index // 2 + half * (index % 2)
            extent = extents[index]
        buffer = memory.array[index * part : (index + 1) * part]
        if mode == "write" or (mode == "both" and index >= half):
            engine.write(extent, buffer)
        else:
            engine.read(extent, buffer)
    engine.wait_all()
