"""What it costs that every step is a checkpoint: commits, export, resume and rollback.

Steps with ``commit_every=1`` take turns with steps of a store that keeps nothing.  An export takes
turns with a plain copy of as many bytes, which is what the disk can do; resume and rollback are
timed in a process that has done nothing before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .arms import GIB, Plan, Worker, parameters
from .bars import Bar, Panel, draw_bars, or_say
from .disk_copy import copy_s
from .model import Shape
from .process import Process
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Call, Row, Sample, run_interleaved
from .step import FULL, QUICK

MIB = 1 << 20
FIVE_GB = Shape(layers=33, width=1024, heads=16, vocabulary=8192, batch=1, tokens=64)
# Ways to update and host memory; under the smaller budget nearly all lives on NVMe.
CASES = (("next_forward", 1 << 30), ("next_forward", 320 << 20), ("backward", 320 << 20))
QUICK_CASES = (("next_forward", 16 << 20),)
PLAIN, DURABLE = "overspill, durable=False", "overspill, commit_every=1"


def _seen(row: Row, key: str) -> float | None:
    return row.samples[-1].seen.get(key) if row.samples else None


def _gib(key: str) -> Column:
    """A column of bytes, the median's neighbour: those of the last sample."""
    titles = {"read_bytes": "read a step", "written_bytes": "written a step"}

    def cell(row: Row) -> str:
        value = _seen(row, key)
        return number(None if value is None else value / GIB, " GiB", 4)

    return titles[key], cell


def commits(plan: Plan, mode: str, folder: Path, device: str) -> Comparison:
    """Steps with and without a commit after each.

    What the plan keeps in memory is written by commits alone: its size is told, so that bytes of
    state that were written twice would show.
    """
    arms = []
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as made:
        for name, durable in ((PLAIN, False), (DURABLE, True)):
            store = Path(made) / str(durable)
            store.mkdir()
            options = {"nvme": str(store), "durable": durable, "host_memory": plan.host_memory}
            if device == "cuda":
                options["device_memory"] = max(parameters(plan.shape), 1 << 28)
            arms.append(Worker(name, plan, device, {**options, "update": mode}))
        rows = run_interleaved(arms, plan.rounds, plan.budget_s)
    title = (
        f"Step and commit, {parameters(plan.shape) / 1e6:.0f} M parameters, {mode}, "
        f"{plan.shape.tokens_per_step} tokens, {plan.host_memory // MIB} MiB of host memory"
    )
    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("over durable=False", spread),
        ("loss", lambda row: number(_seen(row, "loss"), digits=5)),
        _gib("read_bytes"),
        _gib("written_bytes"),
        ("lives in memory", lambda row: number(row.facts.get("memory_bytes", 0) / GIB, " GiB", 4)),
        ("others", others),
    ]
    return Comparison(title, asdict(plan), rows, columns)


class Kept:
    """A store that a process of its own has trained and closed, and what is done with it."""

    def __init__(self, shape: Shape, folder: Path, host_memory: int) -> None:
        self.folder, self.store = folder, folder / "kept"
        self.store.mkdir()
        self._order = {
            "shape": asdict(shape), "store": str(self.store), "host_memory": host_memory
        }  # fmt: skip
        self.facts, self.exported = self.ask({"do": "train"}, self.export)

    @property
    def export(self) -> dict[str, Any]:
        return {"do": "export", "out": str(self.folder / "out")}

    def ask(self, *orders: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Does these things in a fresh process."""
        process = Process("checkpoint_worker")
        try:
            process.ask(self._order)
            return [process.ask(order) for order in orders]
        finally:
            process.close()


class Asked:
    """An arm: what a fresh process says of one order."""

    def __init__(self, name: str, kept: Kept, order: Mapping[str, Any]) -> None:
        self.name, self._kept, self._order = name, kept, order

    def start(self) -> Mapping[str, Any]:
        return {}

    def sample(self) -> Sample:
        (seen,) = self._kept.ask(self._order)
        return Sample(seen.pop("seconds"), seen)

    def close(self) -> None:
        return None


def exports(kept: Kept, rounds: int) -> Comparison:
    """An export beside a copy that reads and writes as much at once, both flushed at the end."""
    read, written = int(kept.facts["held_bytes"]), int(kept.exported["written_bytes"])
    source, target = kept.store / "overspill.store", kept.folder / "copy"

    plain = Call("the disk: a direct copy", lambda: copy_s(source, read, target, written))
    rows = run_interleaved([plain, Asked("overspill export", kept, kept.export)], rounds)
    columns: list[Column] = [
        ("time", lambda row: number(row.median_s, " s")),
        ("rate", lambda r: number(r.median_s and (read + written) / r.median_s / 1e9, " GB/s")),
        ("time over the copy", spread),
        ("CPU", lambda row: number(_seen(row, "cpu_s"), " s")),
        ("memory it took", lambda row: _mib(_seen(row, "grown_bytes"))),
        ("others", others),
    ]
    settings = {"moved_bytes": read + written, "read_bytes": read, "written_bytes": written}
    return Comparison(f"Export of a store of {read / 1e9:.2g} GB", settings, rows, columns)


def _mib(value: float | None) -> str:
    return number(None if value is None else value / MIB, " MiB")


def returns(kept: Kept, rounds: int) -> Comparison:
    """Seconds of ``overspill.resume``, of the step after it, and of ``rollback``."""
    samples = [kept.ask({"do": "resume"})[0] for _ in range(rounds)]
    rows = []
    for name, key in (("resume", "resume_s"), ("rollback", "rollback_s")):
        taken = tuple(Sample(each[key], each) for each in samples)
        times = sorted(sample.seconds for sample in taken)
        rows.append(Row(f"overspill {name}", {}, taken, median_s=times[len(times) // 2]))
    columns: list[Column] = [
        ("time", lambda row: number(row.median_s, " s")),
        ("range", lambda row: f"{_least(row):.3g}-{_most(row):.3g} s"),
        ("peak RSS", lambda row: _mib(_seen(row, "peak_rss_bytes"))),
        ("others", others),
    ]
    held = kept.facts["held_bytes"]
    return Comparison(f"Back to a commit of {held / 1e9:.2g} GB", {}, rows, columns)


def _least(row: Row) -> float:
    return min(sample.seconds for sample in row.samples)


def _most(row: Row) -> float:
    return max(sample.seconds for sample in row.samples)


def _draw(comparisons: list[Comparison], path: Path) -> None:
    panels = []
    for each in comparisons:
        rows = [row for row in each.rows if row.samples]
        bars = [Bar(r.name, [s.seconds for s in r.samples], number(r.median_s, " s")) for r in rows]
        if bars:
            panels.append(Panel(each.title, bars))
    if panels:
        or_say(lambda: draw_bars(panels, "seconds; bars: medians, dots: samples", path))


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite; its stores live in ``folder`` as long as it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    plan = replace(QUICK, rounds=2) if quick else replace(FULL, rounds=7)
    comparisons = [
        commits(replace(plan, host_memory=memory), mode, folder, device)
        for mode, memory in (QUICK_CASES if quick else CASES)
    ]
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as made:
        kept = Kept(plan.shape if quick else FIVE_GB, Path(made), plan.host_memory)
        comparisons += [exports(kept, 1 if quick else 5), returns(kept, 1 if quick else 5)]
    _draw(comparisons, folder / "checkpoint.png")
    return outcome("checkpoint", comparisons, folder)
