"""The disk: the I/O engine beside fio, over one file, in turn.

Reading, writing, and both at once as an optimizer does it (read a part of the state, write the one
before).  fio runs with direct I/O, with and without huge pages; without fio its arms are left out.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.io_engine import Extent, IoEngine, Lease

from .machine import OtherWork
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Arm, Row, Sample, run_interleaved

MIB = 1 << 20
EXTENT_BYTES = 32 * MIB
MODES = ("read", "write", "both")


@dataclass
class Ours:
    """One engine; all its extents in order, twice."""

    name: str
    engine: IoEngine
    extents: Sequence[Extent]
    memory: Lease
    mode: str

    def start(self) -> Mapping[str, Any]:
        self._write(self.extents)
        self.engine.wait_all()
        self._move()
        tuning = self.engine.tuning
        return {"block_bytes": tuning.block_bytes, "queue_depth": tuning.queue_depth}

    def sample(self) -> Sample:
        with OtherWork() as other:
            cpu_s, started = time.process_time(), time.perf_counter()
            self._move()
            seconds = time.perf_counter() - started
            cpu_s = time.process_time() - cpu_s
        return Sample(seconds, {"others": other.share, "cpu_s": cpu_s})

    def close(self) -> None:
        return None

    def _move(self) -> None:
        for _ in range(2):
            if self.mode == "read":
                self._read(self.extents)
            elif self.mode == "write":
                self._write(self.extents)
            else:
                # Half are read while the other half is written, as many bytes as in the others.
                half = len(self.extents) // 2
                for pair in zip(self.extents[:half], self.extents[half:], strict=True):
                    self._read(pair[:1])
                    self._write(pair[1:])
        self.engine.wait_all()

    def _slice(self, extent: Extent) -> Any:
        start = self.extents.index(extent) * EXTENT_BYTES
        return self.memory.array[start : start + EXTENT_BYTES]

    def _read(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.engine.read(extent, self._slice(extent))

    def _write(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.engine.write(extent, self._slice(extent))


@dataclass
class Fio:
    """fio with some setting, over the same bytes."""

    name: str
    file: Path
    nbytes: int
    mode: str
    options: Sequence[str] = field(default_factory=tuple)

    def start(self) -> Mapping[str, Any]:
        self.sample()
        return {"options": list(self.options)}

    def sample(self) -> Sample:
        kind = "rw" if self.mode == "both" else self.mode
        with OtherWork() as other:
            done = subprocess.run(
                [
                    "fio", "--name=x", f"--filename={self.file}", f"--size={self.nbytes}",
                    "--direct=1", f"--rw={kind}", "--loops=2", "--allow_file_create=0",
                    "--fallocate=none", "--group_reporting", "--thread",
                    "--output-format=json", *self.options,
                ],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(
                done.stderr.strip().splitlines()[-1] if done.stderr else "fio failed"
            )
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"]]
        moved = sum(side["io_bytes"] for side in sides)
        seconds = max(side["io_bytes"] / side["bw_bytes"] for side in sides)
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        scale = 2 * self.nbytes / moved
        # What fio itself took is no other's work; its share is small beside that of its CPU time.
        return Sample(seconds * scale, {"others": other.share, "cpu_s": cpu_s * scale})

    def close(self) -> None:
        return None


def _fio_settings(quick: bool) -> dict[str, list[str]]:
    def queue(engine: str, block: str, depth: int) -> list[str]:
        return [f"--ioengine={engine}", f"--bs={block}", f"--iodepth={depth}"]

    settings = {
        "fio io_uring 1M": queue("io_uring", "1M", 32),
        "fio libaio 1M": queue("libaio", "1M", 32),
        "fio io_uring 4M": queue("io_uring", "4M", 8),
    }
    if not quick:
        settings |= {
            "fio io_uring 128k": queue("io_uring", "128k", 64),
            "fio libaio 4M": queue("libaio", "4M", 8),
            "fio psync 1M": ["--ioengine=psync", "--bs=1M"],
            "fio psync 4M": ["--ioengine=psync", "--bs=4M"],
        }
    free = Path("/proc/sys/vm/nr_hugepages").read_text(encoding="ascii").strip()
    if int(free) >= 40:
        for name, options in list(settings.items()):
            settings[f"{name}, huge pages"] = [*options, "--iomem=mmaphuge"]
    return settings


def _per_gb(nbytes: int) -> Sequence[Column]:
    def rate(row: Row) -> str:
        return number(row.median_s and nbytes / row.median_s / 1e9, " GB/s")

    def cpu(row: Row) -> str:
        used = [sample.seen["cpu_s"] for sample in row.samples]
        return number(statistics.median(used) / (nbytes / 1e9), " s/GB") if used else "-"

    return [("rate", rate), ("CPU", cpu), ("time over the first", spread), ("others", others)]


def _engines(folder: Path, nbytes: int) -> dict[str, IoEngine]:
    """Each over a directory of its own; the first one's file is fio's too."""
    settings: dict[str, dict[str, Any]] = {
        "uring": {"backend": "uring", "checksum": False},
        "uring, checksums": {"backend": "uring"},
        "threads": {"backend": "threads", "checksum": False},
    }
    engines = {}
    for index, (name, options) in enumerate(settings.items()):
        place = folder / f"io-{index}"
        place.mkdir(parents=True, exist_ok=True)
        engines[name] = IoEngine(place, nbytes, **options)
    return engines


def _compare(
    mode: str, engines: Mapping[str, IoEngine], places: Mapping[str, Sequence[Extent]],
    memory: Lease, quick: bool,
) -> Comparison:  # fmt: skip
    nbytes, rounds = memory.nbytes, 5 if quick else 15
    arms: list[Arm] = [
        Ours(name, engine, places[name], memory, mode) for name, engine in engines.items()
    ]
    if shutil.which("fio"):
        file = Path(engines["uring"].stats.lanes[0].path)
        for name, options in _fio_settings(quick).items():
            arms.append(Fio(name, file, nbytes, mode, options))
    title = f"{mode}: {nbytes // MIB} MiB, twice, in extents of {EXTENT_BYTES // MIB} MiB"
    rows = run_interleaved(arms, rounds)
    return Comparison(title, {"nbytes": nbytes, "rounds": rounds}, rows, _per_gb(2 * nbytes))


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite in ``folder``: the disk under it is what is measured."""
    nbytes = (256 if quick else 1024) * MIB
    engines = _engines(folder, nbytes)
    try:
        places = {
            name: [engine.allocate(EXTENT_BYTES) for _ in range(nbytes // EXTENT_BYTES)]
            for name, engine in engines.items()
        }
        with engines["uring"].buffer(nbytes) as memory:
            memory.array[:] = 37
            comparisons = [_compare(mode, engines, places, memory, quick) for mode in MODES]
    finally:
        for index, engine in enumerate(engines.values()):
            engine.close()
            (folder / f"io-{index}").rmdir()
    return outcome("io", comparisons, folder)
