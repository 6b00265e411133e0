"""The training step: plain PyTorch in memory, overspill under budgets, and the peers.

Every arm trains in a process of its own, a peer in its own environment (``python -m
benchmarks.peers``).  All are alive at once and take turns, so the peers that were asked for must
fit the machine's memory together; ``--peers all`` therefore makes a comparison for each.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .machine import ROOT
from .model import Gpt, Shape
from .peers import environment_of, python_of
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Row, Sample, run_interleaved

SMALL = Shape(layers=6, width=256, heads=4, vocabulary=2048, batch=4, tokens=128)
GPT_311M = Shape(layers=24, width=1024, heads=16, vocabulary=8192, batch=2, tokens=256)
GPT_311M_X4 = replace(GPT_311M, batch=8)
STATE_BYTES = 12  # per parameter at rest: weight with master, moments; the same in bf16 and fp32
GIB = 1 << 30
# What a peer is called here: its engine, its environment, what is asked of the engine.
PEERS: Mapping[str, tuple[str, str | None, Mapping[str, Any]]] = {
    "deepspeed-nvme": ("deepspeed", "deepspeed", {"kind": "zero3-nvme"}),
    "deepspeed-zero3": ("deepspeed", "deepspeed", {"kind": "zero3-cpu"}),
    "deepspeed-zero2": ("deepspeed", "deepspeed", {"kind": "zero2-cpu"}),
    "superoffload": ("deepspeed", "deepspeed", {"kind": "superoffload"}),
    "zenflow": ("deepspeed", "deepspeed", {"kind": "zenflow"}),
    "torchao": ("torchao", "torchao", {}),
    "fsdp2": ("fsdp2", None, {}),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes", {}),
}


@dataclass(frozen=True)
class Plan:
    """How much is run: ``rounds`` samples of ``steps`` steps each, after ``warmup`` steps.

    ``lead_in``: untimed steps at the start of every sample.  ``modes``: those of overspill's
    update, with the state on NVMe.  ``budget_s``: rounds that would end later are left out.
    """

    shape: Shape
    precision: str
    rounds: int
    steps: int
    warmup: int
    lead_in: int = 1
    host_memory: int = 1 << 30
    modes: tuple[str, ...] = ("step", "backward", "next_forward")
    budget_s: float = 360


QUICK = Plan(SMALL, "bf16", rounds=3, steps=2, warmup=2, host_memory=64 << 20)
FULL = Plan(GPT_311M, "bf16", rounds=3, steps=1, warmup=2)
FULL_X4 = Plan(GPT_311M_X4, "bf16", rounds=2, steps=1, warmup=2, modes=("backward", "next_forward"))


class Worker:
    """An arm in a process of its own.

    ``options``: those of ``wrap``, or of the engine; ``peer``: in whose environment it runs.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        device: str,
        options: Mapping[str, Any] | None,
        engine: str | None = None,
        peer: str | None = None,
        precision: str | None = None,
    ) -> None:
        self.name, self._plan, self._peer = name, plan, peer
        self._spec = {
            "shape": asdict(plan.shape),
            "precision": precision or plan.precision,
            "device": device,
            "engine": engine or ("torch" if options is None else "overspill"),
            "options": dict(options or {}),
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
        python, environment = sys.executable, None
        if self._peer is not None:
            there = python_of(self._peer)
            python, environment = str(there), environment_of(there)
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker"],
            cwd=ROOT,
            env=environment,
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
            "engine": self._spec["engine"],
            "options": self._spec["options"],
            "precision": self._spec["precision"],
            "first_step_s": first["seconds"],
            "warm_step_s": warm["seconds"],
        }

    def sample(self) -> Sample:
        seen = self._ask({"steps": self._plan.steps, "lead_in": self._plan.lead_in})
        return Sample(seen.pop("seconds"), seen)

    def kill(self) -> None:
        """Ends its process at once; whoever waits for its answer gets an error."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._process is not None:
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
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


def arms(plan: Plan, store: Path, device: str, in_host: bool = True) -> list[Worker]:
    """Plain torch, and overspill with its state on NVMe and, if ``in_host``, all in memory."""
    small = {"nvme": str(store), "durable": False, "host_memory": plan.host_memory}
    if device == "cuda":
        small["device_memory"] = max(parameters(plan.shape), 1 << 28)
    made = [Worker("torch, all in memory", plan, device, None)]
    if in_host:
        made.append(Worker("overspill, in host memory", plan, device, {}))
    for mode in plan.modes:
        # A store each: two engines in one directory are refused.
        (store / mode).mkdir(parents=True, exist_ok=True)
        options = {**small, "nvme": str(store / mode), "update": mode}
        made.append(Worker(f"overspill, NVMe, {mode}", plan, device, options))
    return made


def peer(name: str, plan: Plan, store: Path, device: str) -> Worker:
    """The arm of a peer.

    Raises:
        ValueError: there is no such peer.
    """
    if name == "torch-fp32":
        return Worker(name, plan, device, None, precision="fp32")
    if name not in PEERS:
        raise ValueError(f"no peer {name!r}; there are torch-fp32, {', '.join(PEERS)}, all, none")
    engine, environment, options = PEERS[name]
    options = {**options, "batch": plan.shape.batch, "nvme": str(store / name)}
    return Worker(name, plan, device, options, engine, environment)


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


def _compare(plan: Plan, made: Sequence[Worker], title: str = "") -> Comparison:
    named = (
        f"Training step, {parameters(plan.shape) / 1e6:.0f} M parameters, {plan.precision}, "
        f"{plan.shape.tokens_per_step} tokens a step{title}"
    )
    rows = run_interleaved(made, plan.rounds, plan.budget_s)
    return Comparison(named, asdict(plan), rows, columns(plan))


def run(*, quick: bool, folder: Path, peers: Sequence[str] = ()) -> Outcome:
    """Runs the suite; its stores live in ``folder`` as long as it runs.

    ``peers``: names of ``PEERS`` and ``torch-fp32``; ``("all",)``: every one, each in a
    comparison of its own with torch and overspill; none: DeepSpeed's NVMe offload, and with
    ``quick`` no peer.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    plans = [QUICK] if quick else [FULL, FULL_X4]
    each = list(peers) == ["all"]
    wanted = [] if each or list(peers) == ["none"] else list(peers)
    if not peers and not quick:
        wanted = ["deepspeed-nvme"]
    comparisons = []
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as made:
        store = Path(made)
        for name in wanted:  # refused before anything runs
            peer(name, plans[0], store, device)
        for plan in [] if each else plans:
            beside = [peer(name, plan, store, device) for name in wanted]
            # Beside DeepSpeed's 10 GiB and all modes it would not fit into 24 GiB.
            ours = arms(plan, store, device, in_host=not beside)
            comparisons.append(_compare(plan, [*ours, *beside]))
        for name in ("torch-fp32", *PEERS) if each else ():
            plan = replace(plans[0], modes=("backward",))
            ours = [*arms(plan, store, device), peer(name, plan, store, device)]
            comparisons.append(_compare(plan, ours, f"; {name}"))
    return outcome("step", comparisons, folder)
