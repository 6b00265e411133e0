"""The disk: the I/O engine beside fio and DeepSpeed's AIO handle, over one file, in turn.

Reading, writing, and both at once as an optimizer does it.  Every setting of the others is tried
once; the best of each of fio's engines and the best of DeepSpeed's then take turns with ours.  fio
and DeepSpeed use direct I/O; where one is missing, its row says so.  With the rights to it, huge
pages are reserved for fio and given back.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.io_engine import IoEngine, Lease
from overspill.io_engine.native import crc32

from .io_arms import (
    MIB,
    Aio,
    DeepSpeed,
    Fio,
    Ours,
    Work,
    extent_sizes,
    fio_settings,
    fio_version,
    huge_pages,
)  # fmt: skip
from .io_picture import draw_rates
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Arm, Call, Row, run_interleaved

MODES = ("read", "write", "both")
# Least share of every other's rate, and most CPU-seconds per 1e9 bytes without and with checksums.
RATE_GOAL: Mapping[str, float] = {"read": 0.97, "write": 0.97, "both": 0.9}
CPU_GOAL, CPU_GOAL_CHECKED = 0.02, 0.07
SUM_GOAL = 0.05  # core-seconds per 1e9 bytes
# fio moves everything through a few blocks.  As little as this stays in the processor's cache, and
# data that never reaches the memory was read up to a third faster; where fio does that, it is held
# against ours through the same few blocks.
CACHED_BYTES = 8 * MIB
SMALL, SMALL_DEPTH = "overspill threads 1M, through 4 MiB", 4
THREADS, BLOCKS = (1, 2, 4, 8), (MIB, 4 * MIB)  # of DeepSpeed's handle

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "overspill uring 4M": {"backend": "uring", "checksum": False},
    "overspill uring 4M, checksums": {"backend": "uring", "block_bytes": 4 * MIB},
    "overspill uring 1M": {
        "backend": "uring", "block_bytes": MIB, "queue_depth": 32, "checksum": False,
    },
    "overspill uring 1M, checksums": {
        "backend": "uring", "block_bytes": MIB, "queue_depth": 32,
    },
    "overspill threads 4M": {"backend": "threads", "block_bytes": 4 * MIB, "checksum": False},
    SMALL: {
        "backend": "threads", "block_bytes": MIB, "queue_depth": SMALL_DEPTH, "checksum": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """How much is moved and how often.  ``budget_s``: for the rounds of one mode."""

    nbytes: int
    passes: int
    least_rounds: int
    most_rounds: int
    budget_s: float

    def rounds(self, arms: int, seconds: float) -> int:
        """Rounds that fit into the budget, if an arm takes ``seconds`` a round; one to warm up."""
        fitting = int(self.budget_s / max(arms * seconds, 1e-9)) - 1
        return min(max(fitting, self.least_rounds), self.most_rounds)


FULL = Scale(1024 * MIB, 2, least_rounds=5, most_rounds=15, budget_s=62.0)
QUICK = Scale(256 * MIB, 2, least_rounds=2, most_rounds=4, budget_s=8.0)


@dataclass
class Bench:
    """What all modes share: engines with their extents, and who else takes part."""

    scale: Scale
    quick: bool
    ours: Sequence[tuple[str, IoEngine, Sequence[Any]]]
    memory: Lease
    file: Path
    fio: str | None
    no_huge_pages: str
    deepspeed: DeepSpeed | None
    no_deepspeed: str

    def compare(self, mode: str) -> Comparison:
        """All settings tried, the best of them beside ours."""
        work = Work(mode, self.scale.nbytes, self.scale.passes)
        arms: list[Arm] = [
            Ours(
                name,
                engine,
                extents,
                self.memory,
                work,
                room_bytes=SMALL_DEPTH * MIB if name == SMALL else 0,
            )
            for name, engine, extents in self.ours
        ]
        tried, fio_arms = self._fio(work)
        more, aio_arms = self._deepspeed(work)
        arms += [*fio_arms, *aio_arms]
        picked = [arm.name for arm in (*fio_arms, *aio_arms)]
        longest = max((t["wall_s"] for n, t in (tried | more).items() if n in picked), default=1.0)
        rounds = self.scale.rounds(len(arms), longest)
        settings = {
            "mode": mode, "nbytes": work.nbytes, "passes": work.passes,
            "moved_bytes": work.moved_bytes, "rounds": rounds, "rate_goal": RATE_GOAL[mode],
            "cpu_goal_s_per_gb": CPU_GOAL, "cpu_goal_checked_s_per_gb": CPU_GOAL_CHECKED,
            "fio": self.fio, "no_huge_pages": self.no_huge_pages, "tried_once": tried | more,
        }  # fmt: skip
        title = f"{mode}: {work.nbytes // MIB} MiB in extents of 16, 32 and 64 MiB"
        if tried or more:
            title += f"; the best of {len(tried)} settings of fio and {len(more)} of DeepSpeed"
        if self.no_huge_pages:
            title += " (fio without huge pages)"
        rows = run_interleaved(arms, rounds)
        return Comparison(title, settings, rows, columns(work, rows))

    def _fio(self, work: Work) -> tuple[dict[str, Any], list[Arm]]:
        if self.fio is None:
            return {}, []
        arms = [
            Fio(name, self.file, work, options)
            for name, options in fio_settings(work.mode, not self.no_huge_pages, self.quick).items()
        ]
        tried = _try_once(arms)
        engines = {arm.engine: None for arm in arms}
        return tried, [_fastest([a for a in arms if a.engine == e], tried) for e in engines]

    def _deepspeed(self, work: Work) -> tuple[dict[str, Any], list[Arm]]:
        if self.deepspeed is None:
            missing = Aio("DeepSpeed AIO", None, work, 0, 0, missing=self.no_deepspeed)
            return {}, [missing]
        arms = [
            Aio(f"DeepSpeed AIO {block // MIB}M x {threads} threads", self.deepspeed, work,
                threads, block)
            for threads in ((1, 4) if self.quick else THREADS)
            for block in ((MIB,) if self.quick else BLOCKS)
        ]  # fmt: skip
        tried = _try_once(arms)
        return tried, [_fastest(arms, tried)]


def _try_once(arms: Sequence[Fio | Aio]) -> dict[str, Any]:
    """Seconds and wall clock of one sample of each, by name; an error in their place."""
    tried: dict[str, Any] = {}
    for arm in arms:
        try:
            sample = arm.sample()
        except RuntimeError as error:
            tried[arm.name] = {"error": str(error), "seconds": None, "wall_s": 0.0}
        else:
            tried[arm.name] = {"seconds": sample.seconds, "wall_s": sample.seen["wall_s"]}
    return tried


def _fastest(arms: Sequence[Fio | Aio], tried: Mapping[str, Any]) -> Arm:
    return min(arms, key=lambda arm: tried[arm.name]["seconds"] or float("inf"))


def columns(work: Work, rows: Sequence[Row]) -> list[Column]:
    """Rate, CPU, and whether ours keeps up with each other arm, and saves CPU."""
    gigabytes = work.moved_bytes / 1e9
    small = next((row for row in rows if row.name == SMALL), None)

    def rate(row: Row) -> str:
        return number(row.median_s and gigabytes / row.median_s, " GB/s")

    def cpu_s(row: Row) -> float:
        return statistics.median(s.seen["cpu_s"] for s in row.samples) / gigabytes

    def cpu(row: Row) -> str:
        return number(cpu_s(row), " s/GB") if row.samples else "-"

    def goal(row: Row) -> str:
        if not row.samples or row is small:
            return "-"
        if row.name.startswith("overspill"):
            most = CPU_GOAL_CHECKED if "checksums" in row.name else CPU_GOAL
            return f"CPU at most {most}: {'holds' if cpu_s(row) <= most else 'MISSED'}"
        least, cached = RATE_GOAL[work.mode], row.facts.get("memory_bytes", MIB**2) <= CACHED_BYTES
        share = _share(small if small and cached else rows[0], row)
        met = "holds" if share >= least else "MISSED"
        return f"ours at least {least} of it: {met} ({share:.2f}{', in cache' if cached else ''})"

    return [
        ("rate", rate), ("CPU", cpu), ("time over the first", spread), ("goal", goal),
        ("others", others),
    ]  # fmt: skip


def _share(ours: Row, other: Row) -> float:
    """Our rate over the other's, median of the rounds."""
    pairs = zip(ours.samples, other.samples, strict=False)
    return statistics.median(theirs.seconds / mine.seconds for mine, theirs in pairs)


def compare_checksums(memory: Lease, quick: bool) -> Comparison:
    """What checking costs: a sum over memory that no cache holds, in blocks of 4 MiB, one core."""
    arms: list[Arm] = []
    for name, crc in (("overspill CRC-32", crc32), ("zlib.crc32", zlib.crc32)):

        def work(crc: Any = crc) -> float:
            started = time.perf_counter()
            for start in range(0, memory.nbytes, 4 * MIB):
                crc(memory.array[start : start + 4 * MIB])
            return time.perf_counter() - started

        arms.append(Call(name, work))
    gigabytes = memory.nbytes / 1e9

    def cost(row: Row) -> str:
        return number(row.median_s and row.median_s / gigabytes, " s/GB")

    def goal(row: Row) -> str:
        if row.median_s is None or not row.name.startswith("overspill"):
            return "-"
        met = "holds" if row.median_s / gigabytes <= SUM_GOAL else "MISSED"
        return f"at most {SUM_GOAL} s/GB: {met}"

    rows = run_interleaved(arms, 3 if quick else 9)
    settings = {"nbytes": memory.nbytes, "goal_s_per_gb": SUM_GOAL}
    found: list[Column] = [("cost", cost), ("time over the first", spread), ("goal", goal)]
    return Comparison("checksums in memory, one core", settings, rows, [*found, ("others", others)])


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite in ``folder``: the disk under it is what is measured.  Also writes io.png.

    At most six minutes, quick 40 seconds; DeepSpeed's first start ever builds its extension.
    """
    scale = QUICK if quick else FULL
    sizes = extent_sizes(scale.nbytes)
    with ExitStack() as stack:
        ours = []
        for index, (name, options) in enumerate(SETTINGS.items()):
            place = folder / f"io-{index}"
            place.mkdir(parents=True, exist_ok=True)
            stack.callback(place.rmdir)
            options = {"block_bytes": 4 * MIB, "queue_depth": None, **options}
            engine = stack.enter_context(IoEngine(place, scale.nbytes, **options))
            mine = [MIB] * (scale.nbytes // MIB) if name == SMALL else sizes
            ours.append((name, engine, [engine.allocate(size) for size in mine]))
        memory = stack.enter_context(ours[0][1].buffer(scale.nbytes))
        memory.array[:] = 37
        for name, engine, extents in ours:
            Ours(name, engine, extents, memory, Work("write", scale.nbytes, 1)).fill()
        file = Path(ours[0][1].stats.lanes[0].path)
        deepspeed, no_deepspeed = None, ""
        try:
            deepspeed = DeepSpeed(file, sizes)
            stack.callback(deepspeed.close)
        except RuntimeError as error:
            no_deepspeed = str(error)
        fio = fio_version()
        no_huge_pages = stack.enter_context(huge_pages()) if fio else ""
        bench = Bench(scale, quick, ours, memory, file, fio, no_huge_pages, deepspeed, no_deepspeed)
        rates = [bench.compare(mode) for mode in MODES]
        sums = compare_checksums(memory, quick)
    draw_rates(rates, folder / "io.png")
    return outcome("io", [*rates, sums], folder)
