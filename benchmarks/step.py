"""The training step: plain PyTorch with everything in memory beside overspill under budgets."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .machine import ROOT
from .model import Gpt, Shape
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Row, Sample, run_interleaved

SMALL = Shape(layers=6, width=256, heads=4, vocabulary=2048, batch=4, tokens=128)
GPT_311M = Shape(layers=24, width=1024, heads=16, vocabulary=8192, batch=2, tokens=256)
STATE_BYTES = 12  # per parameter at rest: weight with master, moments; the same in bf16 and fp32
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much is run: ``rounds`` samples of ``steps`` steps each, after ``warmup`` steps."""

    shape: Shape
    precision: str
    rounds: int
    steps: int
    warmup: int


QUICK = Plan(SMALL, "bf16", rounds=4, steps=2, warmup=3)
FULL = Plan(GPT_311M, "bf16", rounds=5, steps=2, warmup=3)


class Worker:
    """An arm in a process of its own.  ``options``: those of ``wrap``; ``None`` for plain torch."""

    def __init__(
        self, name: str, plan: Plan, device: str, options: Mapping[str, Any] | None
    ) -> None:
        self.name, self._plan = name, plan
        self._spec = {
            "shape": asdict(plan.shape),
            "precision": plan.precision,
            "device": device,
            "options": None if options is None else dict(options),
        }
        self._process: subprocess.Popen[str] | None = None

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name!r} ended with code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def start(self) -> Mapping[str, Any]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        facts = self._ask(self._spec)
        first = self._ask({"steps": 1})
        warm = self._ask({"steps": self._plan.warmup - 1})
        return {
            **facts,
            "device": self._spec["device"],
            "options": self._spec["options"],
            "first_step_s": first["seconds"],
            "warm_step_s": warm["seconds"],
        }

    def sample(self) -> Sample:
        seen = self._ask({"steps": self._plan.steps})
        return Sample(seen.pop("seconds"), seen)

    def close(self) -> None:
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def parameters(shape: Shape) -> int:
    """Parameters of the model, which is not built for it."""
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(shape).parameters())


def arms(plan: Plan, store: Path) -> list[Worker]:
    """Plain torch, and overspill with everything in memory and with a quarter of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = parameters(plan.shape) * STATE_BYTES
    small = {"nvme": str(store), "durable": False, "host_memory": max(state // 4, 64 << 20)}
    if device == "cuda":
        weights = parameters(plan.shape) * 2
        small["device_memory"] = max(weights // 2, 1 << 28)
    return [
        Worker("torch, all in memory", plan, device, None),
        Worker("overspill, in host memory", plan, device, {}),
        Worker("overspill, NVMe, step", plan, device, {**small, "update": "step"}),
        Worker("overspill, NVMe, backward", plan, device, {**small, "update": "backward"}),
    ]


def columns(plan: Plan) -> list[Column]:
    def last(row: Row, key: str) -> float | None:
        return row.samples[-1].seen.get(key) if row.samples else None

    def gib(row: Row, key: str) -> str:
        value = last(row, key)
        return number(None if value is None else value / GIB, " GiB")

    def over_bound(row: Row) -> str:
        bound = last(row, "bound_s")
        return number(row.median_s / bound if row.median_s and bound else None)

    return [
        ("step", lambda row: number(row.median_s, " s")),
        ("over torch", spread),
        (
            "tokens/s",
            lambda r: number(r.median_s and plan.shape.tokens_per_step / r.median_s, digits=4),
        ),
        ("loss", lambda row: number(last(row, "loss"), digits=5)),
        ("over bound", over_bound),
        ("CPU", lambda row: number(last(row, "cpu_s"), " s")),
        ("peak RSS", lambda row: gib(row, "peak_rss_bytes")),
        ("read a step", lambda row: gib(row, "read_bytes")),
        ("written a step", lambda row: gib(row, "written_bytes")),
        ("others", others),
    ]


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite; its store lives in ``folder`` as long as it runs."""
    plan = QUICK if quick else FULL
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="store-") as store:
        rows = run_interleaved(arms(plan, Path(store)), plan.rounds)
    title = (
        f"Training step, {parameters(plan.shape) / 1e6:.0f} M parameters, {plan.precision}, "
        f"{plan.shape.tokens_per_step} tokens a step"
    )
    return outcome("step", [Comparison(title, asdict(plan), rows, columns(plan))], folder)
