"""``python -m benchmarks.gpu``: what matters on a GPU, by priority, within a time budget.

The GPU tests, the host link, then training steps: each arm alone on the device, in a process of its
own, ended when the time is up.  Results are written after every arm, so a run that is cut keeps
them.  With ``--device sim`` it all runs to its end on any machine, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .arms import GIB, PEERS, Plan, Worker, parameters, peer
from .machine import ROOT
from .model import Shape
from .results import Comparison, outcome
from .runner import Row, run_interleaved
from .step import columns

TINY = Shape(layers=3, width=64, heads=4, vocabulary=256, batch=2, tokens=32)
# Widths, layers and vocabulary of Llama models of these sizes.
B1 = Shape(layers=16, width=2048, heads=16, vocabulary=32000, batch=8, tokens=2048)
B3 = Shape(layers=26, width=3072, heads=24, vocabulary=32000, batch=8, tokens=2048)
B7 = Shape(layers=32, width=4096, heads=32, vocabulary=32000, batch=8, tokens=2048)


@dataclass(frozen=True)
class Group:
    """Arms on one shape: plain torch, ``wrap`` with these options, and peers."""

    shape: Shape
    options: Mapping[str, Mapping[str, Any]]
    peers: Sequence[str] = ()


def groups(device: str) -> list[Group]:
    """What is run, the most telling first."""
    host = {"host, step": {"update": "step"}, "host, backward": {"update": "backward"}}
    disk = {"NVMe, backward": {"update": "backward", "nvme": True, "durable": False}}
    if device == "sim":
        small = {"device_memory": 4 << 20}
        return [Group(TINY, {name: {**o, **small} for name, o in (host | disk).items()})]
    beside = ("deepspeed-zero3", "torchao", "deepspeed-nvme")
    return [
        Group(B1, host | disk, beside),
        Group(B7, {"host, backward": {**host["host, backward"], "device_memory": 40 * GIB}}),
        Group(replace(B7, batch=32), {"host, backward": host["host, backward"]}),
        Group(B3, disk),
    ]


def _arms(group: Group, plan: Plan, device: str, store: Path) -> list[Worker]:
    made = [Worker("torch, all in memory", plan, device, None)]
    for name, options in group.options.items():
        there = store / name.replace(", ", "-")
        there.mkdir()
        given = {**options, **({"nvme": str(there)} if options.get("nvme") else {})}
        made.append(Worker(f"overspill, {name}", plan, device, given))
    return made + [peer(name, plan, store, device) for name in group.peers if name in PEERS]


def alone(arm: Worker, rounds: int, until: float) -> Row:
    """The arm with the device to itself; ended at ``until`` of the monotonic clock."""
    left = until - time.monotonic()
    if left <= 0:
        return Row(arm.name, {}, (), error="not run: the time was up")
    timer = threading.Timer(left, arm.kill, ["the time was up"])
    timer.start()
    try:
        (row,) = run_interleaved([arm], rounds)
    finally:
        timer.cancel()
    return row


def _held(rows: Sequence[Row]) -> list[Row]:
    """Rows with ratios of medians to the first: the arms did not take turns."""
    first = rows[0].median_s
    ratios = [r.median_s / first if r.median_s and first else None for r in rows]
    return [
        replace(r, ratio=ratio, ratio_low=ratio, ratio_high=ratio)
        for r, ratio in zip(rows, ratios, strict=True)
    ]


def run_steps(device: str, folder: Path, until: float) -> None:
    """Runs the groups; ``gpu.json`` and ``gpu.md`` are written anew after every arm."""
    done: list[Comparison] = []
    for group in groups(device):
        plan = Plan(group.shape, "bf16", rounds=3, steps=1, warmup=2)
        rows: list[Row] = []
        with tempfile.TemporaryDirectory(dir=folder, prefix="store-") as store:
            for arm in _arms(group, plan, device, Path(store)):
                rows.append(alone(arm, plan.rounds, until))
                title = (
                    f"{parameters(plan.shape) / 1e9:.1f} B parameters, "
                    f"{plan.shape.tokens_per_step} tokens a step; each alone"
                )
                now = Comparison(title, asdict(plan), _held(rows), columns(plan))
                outcome("gpu", [*done, now], folder).save(folder)
        done.append(now)
        print(now.table(), flush=True)


def main() -> int:
    """Runs all; 1 if the GPU tests failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    if given.device == "cuda":
        failed = _part(["-m", "pytest", "-m", "gpu", "-q"], 150, until)
    _part(["-m", "benchmarks", "copy", "--quick", "--out", str(folder)], 60, until)
    run_steps(given.device, folder, until)
    return 1 if failed else 0


def _part(words: Sequence[str], limit_s: float, until: float) -> int:
    left = max(1.0, min(limit_s, until - time.monotonic()))
    try:
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, timeout=left, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(words)}: ended after {left:.0f} s", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
