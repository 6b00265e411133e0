"""The arms of the disk suite: our engine, fio, and DeepSpeed's AIO handle, over the same bytes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from overspill.io_engine import Extent, IoEngine, Lease

from .machine import OtherWork
from .process import Process
from .runner import Sample

MIB = 1 << 20
# What an optimizer moves at a time, in turn.
EXTENT_BYTES = (16 * MIB, 32 * MIB, 64 * MIB, 16 * MIB)
HUGE_PAGES = 72  # of 2 MiB: 64 transfers of 128 KiB, 32 of 1 MiB or 8 of 4 MiB, and what fio adds
SAMPLE_LIMIT_S = 60.0  # DeepSpeed's handle; a lost request would be waited for without end
RESERVED = Path("/proc/sys/vm/nr_hugepages")


@dataclass(frozen=True)
class Work:
    """What one sample moves: all extents, ``passes`` times, in ``mode`` read, write or both.

    In ``both`` every second extent is read and the others are written, and the other way round in
    the next pass: as many bytes as in the other modes, half of them each way.
    """

    mode: str
    nbytes: int
    passes: int

    @property
    def moved_bytes(self) -> int:
        return self.nbytes * self.passes

    def steps(self, count: int) -> Iterator[tuple[bool, int]]:
        """(whether it is written, index of the extent) in order, for ``count`` extents."""
        for number in range(self.passes):
            for index in range(count):
                both = (index + number) % 2 == 1
                yield self.mode == "write" or (self.mode == "both" and both), index


def extent_sizes(nbytes: int) -> list[int]:
    """Sizes of the extents that ``nbytes`` are cut into."""
    whole = sum(EXTENT_BYTES)
    if nbytes % whole:
        raise ValueError(f"{nbytes} bytes are not a multiple of {whole}")
    return [*EXTENT_BYTES] * (nbytes // whole)


@dataclass
class Ours:
    """One engine with some setting."""

    name: str
    engine: IoEngine
    extents: Sequence[Extent]
    memory: Lease
    work: Work
    room_bytes: int = 0  # if given, all extents share the first so many bytes of the memory

    def fill(self) -> None:
        """Writes every extent: blocks only reserved are read without the disk."""
        for extent, buffer in zip(self.extents, self._buffers(), strict=True):
            self.engine.write(extent, buffer)
        self.engine.wait_all()

    def start(self) -> Mapping[str, Any]:
        self._move()
        tuning = self.engine.tuning
        return {
            "block_bytes": tuning.block_bytes, "queue_depth": tuning.queue_depth,
            "memory_bytes": self.room_bytes or self.memory.nbytes,
        }  # fmt: skip

    def sample(self) -> Sample:
        with OtherWork() as other:
            cpu_s, started = time.process_time(), time.perf_counter()
            self._move()
            seconds = time.perf_counter() - started
            cpu_s = time.process_time() - cpu_s
        return Sample(seconds, {"others": other.share, "cpu_s": cpu_s})

    def close(self) -> None:
        return None

    def _buffers(self) -> list[Any]:
        views, start = [], 0
        for extent in self.extents:
            if self.room_bytes and start + extent.nbytes > self.room_bytes:
                start = 0
            views.append(self.memory.array[start : start + extent.nbytes])
            start += extent.nbytes
        return views

    def _move(self) -> None:
        buffers = self._buffers()
        for write, index in self.work.steps(len(self.extents)):
            move = self.engine.write if write else self.engine.read
            move(self.extents[index], buffers[index])
        self.engine.wait_all()


# -- fio ------------------------------------------------------------------------------------------


def fio_version() -> str | None:
    """What ``fio --version`` says; ``None`` without fio."""
    try:
        done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@contextmanager
def huge_pages() -> Iterator[str]:
    """Reserves huge pages for fio if that is allowed, and gives them back; yields what came of it.

    ``""``: they are there.  Ours need none reserved: ``madvise`` is enough for them.
    """
    before = int(RESERVED.read_text(encoding="ascii"))
    try:
        if before < HUGE_PAGES:
            RESERVED.write_text(str(HUGE_PAGES), encoding="ascii")
        now = int(RESERVED.read_text(encoding="ascii"))
        yield "" if now >= HUGE_PAGES else f"the system gives {now} of {HUGE_PAGES} huge pages"
    except PermissionError:
        yield f"{HUGE_PAGES} huge pages have to be reserved: sysctl vm.nr_hugepages={HUGE_PAGES}"
    finally:
        if int(RESERVED.read_text(encoding="ascii")) != before:
            RESERVED.write_text(str(before), encoding="ascii")


def fio_settings(mode: str, huge: bool, quick: bool) -> dict[str, list[str]]:
    """Options by name: engines, block sizes, pages; for ``both`` also a reader beside a writer."""
    registered = ["--registerfiles=1"]
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == -1 or os.geteuid() == 0:
        registered.append("--fixedbufs=1")
    engines: dict[str, list[str]] = {"io_uring": registered, "libaio": [], "psync": []}
    depths = {"128k": 64, "1M": 32, "4M": 8}
    if quick:
        engines, depths = {"io_uring": registered, "libaio": []}, {"1M": 32, "4M": 8}
    settings = {}
    for engine, more in engines.items():
        for block, depth in depths.items():
            options = [f"--ioengine={engine}", f"--bs={block}", *more]
            if engine == "psync":
                settings[f"fio {engine} {block}"] = options
                settings[f"fio {engine} {block} x 4 threads"] = [*options, "--numjobs=4"]
            else:
                options.append(f"--iodepth={depth}")
                settings[f"fio {engine} {block}"] = options
                if mode == "both":
                    settings[f"fio {engine} {block}, reader + writer"] = [*options, "--numjobs=2"]
    if huge:
        pages = {f"{name}, huge pages": [*o, "--iomem=mmaphuge"] for name, o in settings.items()}
        # Without them fio is a third slower: a short run has no time for that.
        settings = pages if quick else settings | pages
    return settings


def _children_s() -> float:
    """CPU-seconds of the processes started by this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fio_memory_bytes(options: Sequence[str]) -> int:
    """The memory that fio moves everything through: a block for each transfer in flight."""
    given = dict(option.removeprefix("--").split("=") for option in options)
    block = given["bs"]
    nbytes = int(block[:-1]) << {"k": 10, "M": 20}[block[-1]]
    return nbytes * int(given.get("iodepth", 1)) * int(given.get("numjobs", 1))


@dataclass
class Fio:
    """fio with some setting: direct I/O on the same file, the same bytes."""

    name: str
    file: Path
    work: Work
    options: Sequence[str] = field(default_factory=tuple)

    @property
    def engine(self) -> str:
        """Its I/O engine, such as ``libaio``."""
        return next(o.partition("=")[2] for o in self.options if o.startswith("--ioengine="))

    def start(self) -> Mapping[str, Any]:
        self.sample()
        return {
            "command": " ".join(self._command()),
            "memory_bytes": fio_memory_bytes(self.options),
        }

    def sample(self) -> Sample:
        started, before = time.perf_counter(), _children_s()
        with OtherWork() as other:
            done = subprocess.run(self._command(), capture_output=True, text=True, check=False)
        wall_s, own_s = time.perf_counter() - started, _children_s() - before
        if done.returncode != 0:
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved = sum(job[side]["io_bytes"] for job in jobs for side in ("read", "write"))
        if moved != self.work.moved_bytes:
            raise RuntimeError(f"fio moved {moved} bytes, not {self.work.moved_bytes}")
        seconds = max(job[side]["runtime"] for job in jobs for side in ("read", "write")) / 1e3
        cpu_s = sum((j["usr_cpu"] + j["sys_cpu"]) / 100 * j["job_runtime"] / 1e3 for j in jobs)
        # What fio itself takes, with its start and end, is not the work of others.
        share = max(0.0, other.share - own_s / (wall_s * psutil.cpu_count()))
        return Sample(seconds, {"others": share, "cpu_s": cpu_s, "wall_s": wall_s})

    def close(self) -> None:
        return None

    def _command(self) -> list[str]:
        """The global options, then one job or several, each over a part of the file."""
        count = next((int(o.split("=")[1]) for o in self.options if o.startswith("--numjobs")), 1)
        kind = "rw" if self.work.mode == "both" else self.work.mode
        kinds = ["read", "write"] if count == 2 else [kind] * count
        part = self.work.nbytes // count
        words = [
            "fio", "--direct=1", "--thread", "--allow_file_create=0", "--fallocate=none",
            "--output-format=json", f"--filename={self.file}", f"--loops={self.work.passes}",
            *(o for o in self.options if not o.startswith("--numjobs")),
        ]  # fmt: skip
        for index, job in enumerate(kinds):
            words += [f"--name=j{index}", f"--rw={job}", f"--offset={index * part}"]
            words += [f"--size={part}"]
        return words


# -- DeepSpeed ------------------------------------------------------------------------------------


class DeepSpeed:
    """A process with DeepSpeed's handles and its own locked buffers, one for each extent."""

    def __init__(self, file: Path, sizes: Sequence[int]) -> None:
        """Starts it; the first time, DeepSpeed builds its extension for some minutes.

        Raises:
            RuntimeError: it is not installed, or does not start; why, and what to do.
        """
        self._process = Process("io_deepspeed", peer="deepspeed")
        try:
            self.facts = self._process.ask({"file": str(file), "sizes": list(sizes)})
        except RuntimeError:
            self._process.close()
            raise

    def move(self, work: Work, threads: int, block_bytes: int) -> dict[str, Any]:
        """``seconds`` and ``cpu_s`` of one sample of ``work``."""
        steps = list(work.steps(self.facts["extents"]))
        asked = {"steps": steps, "threads": threads, "block_bytes": block_bytes}
        return self._process.ask(asked, SAMPLE_LIMIT_S)

    def close(self) -> None:
        self._process.close()


@dataclass
class Aio:
    """DeepSpeed's AIO handle with some setting."""

    name: str
    peer: DeepSpeed | None
    work: Work
    threads: int
    block_bytes: int
    missing: str = ""

    def start(self) -> Mapping[str, Any]:
        self.sample()
        assert self.peer is not None
        return {**self.peer.facts, "threads": self.threads, "block_bytes": self.block_bytes}

    def sample(self) -> Sample:
        if self.peer is None:
            raise RuntimeError(self.missing)
        with OtherWork() as other:
            started = time.perf_counter()
            told = self.peer.move(self.work, self.threads, self.block_bytes)
            wall_s = time.perf_counter() - started
        share = max(0.0, other.share - told["cpu_s"] / (wall_s * psutil.cpu_count()))
        return Sample(told["seconds"], {"others": share, "cpu_s": told["cpu_s"], "wall_s": wall_s})

    def close(self) -> None:
        return None
