"""Several processes that train one model: overspill over FSDP2 and DDP, beside FSDP2 alone, its
CPUOffloadPolicy, and DeepSpeed's ZeRO-2 and ZeRO-3 with state, and parameters, in host memory.

Each rank is a process with its part of the cores.  Losses are means over ranks.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .arms import GIB, Plan, Worker, parameters
from .model import Shape
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Row, Sample, run_interleaved

RANKS = 2
QUICK = Plan(Shape(2, 128, 4, 512, 4, 64), "fp32", rounds=1, steps=1, warmup=1)
FULL = Plan(Shape(8, 512, 8, 8192, 4, 128), "fp32", rounds=5, steps=2, warmup=2)


class Group:
    """An arm of several ranks, which are asked at the same time."""

    def __init__(
        self, name: str, plan: Plan, engine: str, options: Mapping[str, Any],
        peer: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self._make = name, (plan, engine, options, peer)
        self._workers: list[Worker] = []
        # Its threads start the processes, which end with whoever has started them.
        self._pool = ThreadPoolExecutor(RANKS)

    def start(self) -> Mapping[str, Any]:
        """See ``Worker``; facts are those of the first rank."""
        plan, engine, options, peer = self._make
        if peer is not None:  # what it compiles on first use it compiles once: ranks would race
            alone = Worker(self.name, QUICK, "cpu", options, engine, peer)
            try:
                alone.start()
            finally:
                alone.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._workers = [
            Worker(
                f"{self.name}, rank {rank}", plan, "cpu", options, engine, peer,
                place={"rank": rank, "ranks": RANKS, "port": port},
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        return self._all(Worker.start)[0]

    def _all(self, ask: Callable[[Worker], Any]) -> list[Any]:
        return list(self._pool.map(ask, self._workers))

    def sample(self) -> Sample:
        """The slowest rank's seconds and the most memory of one; else sums and means."""
        found: Sequence[Sample] = self._all(Worker.sample)
        seen: dict[str, Any] = dict(found[0].seen)
        for key in ("peak_rss_bytes", "others"):
            seen[key] = max(each.seen[key] for each in found)
        for key in ("read_bytes", "written_bytes", "cpu_s"):
            seen[key] = sum(each.seen[key] for each in found)
        seen["loss"] = statistics.fmean(each.seen["loss"] for each in found)
        return Sample(max(each.seconds for each in found), seen)

    def close(self) -> None:
        self._all(Worker.close)
        self._pool.shutdown()


def _arms(plan: Plan, store: Path, quick: bool) -> list[Group]:
    room = 64 << 20 if quick else RANKS * GIB
    small = RANKS * (32 << 20) if quick else RANKS * (180 << 20)
    # The rest of the weights is elsewhere; a unit of a small model is a large part of it.
    streamed = int(parameters(plan.shape) * 4 / RANKS * (3 / 4 if quick else 2 / 3))
    disk = {"host_memory": small, "durable": False}
    folders = {}
    for name in ("fsdp", "durable", "ddp"):
        folders[name] = str(store / name)
        (store / name).mkdir()
    made = [
        Group("FSDP2, torch's AdamW, in memory", plan, "fsdp2-memory", {}),
        Group("FSDP2 with CPUOffloadPolicy", plan, "fsdp2", {}),
        Group("overspill over FSDP2, host memory", plan, "overspill-fsdp2", {"host_memory": room}),
        Group("overspill over FSDP2, shards streamed", plan, "overspill-fsdp2",
              {"host_memory": room, "device": "sim", "device_memory": streamed}),
        Group("overspill over FSDP2, NVMe", plan, "overspill-fsdp2",
              {**disk, "nvme": folders["fsdp"]}),
        Group("overspill over FSDP2, NVMe, durable", plan, "overspill-fsdp2",
              {**disk, "nvme": folders["durable"], "durable": True}),
        Group("overspill over DDP, NVMe", plan, "overspill-ddp", {**disk, "nvme": folders["ddp"]}),
    ]  # fmt: skip
    if not quick:
        batch = plan.shape.batch // RANKS
        made += [
            Group(name, plan, "deepspeed", {"kind": kind, "batch": batch}, "deepspeed")
            for name, kind in (
                ("DeepSpeed ZeRO-2, CPU offload", "zero2-cpu"),
                ("DeepSpeed ZeRO-3, CPU offload, parameters too", "zero3-all-cpu"),
            )
        ]
    return made


def _beside_torch(row: Row) -> str:
    if not row.samples:
        return "-"
    peak = row.samples[-1].seen["peak_rss_bytes"] - row.facts["idle_rss_bytes"]
    return number(peak / (1 << 20), " MiB", 4)


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite; stores live in ``folder`` as long as it runs."""
    plan = QUICK if quick else FULL
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as made:
        rows = run_interleaved(_arms(plan, Path(made), quick), plan.rounds)

    def seen(row: Row, key: str) -> float | None:
        return row.samples[-1].seen.get(key) if row.samples else None

    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("over the first", spread),
        ("a rank's memory beside torch, peak", _beside_torch),
        ("written a step", lambda row: number((seen(row, "written_bytes") or 0) / (1 << 20),
                                              " MiB")),
        ("CPU a step", lambda row: number(seen(row, "cpu_s"), " s")),
        ("loss", lambda row: number(seen(row, "loss"), "", 6)),
        ("others, the other rank among them", others),
    ]  # fmt: skip
    size, tokens = parameters(plan.shape) / 1e6, plan.shape.tokens_per_step
    title = f"{RANKS} ranks, {size:.4g} M parameters, fp32, {tokens} tokens a step in all"
    return outcome("ranks", [Comparison(title, asdict(plan), rows, columns)], folder)
