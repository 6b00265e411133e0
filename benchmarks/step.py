"""The training step: plain PyTorch in memory, overspill under budgets, and the peers.

Every arm trains in a process of its own, a peer in its own environment (``python -m
benchmarks.peers``).  All are alive at once and take turns, so the peers that were asked for must
fit the machine's memory together; ``--peers all`` therefore makes a comparison for each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from .arms import GIB, PEERS, Plan, Worker, parameters, peer
from .bars import draw_times
from .model import Shape
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Row, run_interleaved

SMALL = Shape(layers=6, width=256, heads=4, vocabulary=2048, batch=4, tokens=128)
GPT_311M = Shape(layers=24, width=1024, heads=16, vocabulary=8192, batch=2, tokens=256)
GPT_311M_X4 = replace(GPT_311M, batch=8)
PEER_LIMIT_S = 240.0  # of a peer's start or sample, which may compile its extensions first
QUICK = Plan(SMALL, "fp32", rounds=3, steps=2, warmup=2, host_memory=64 << 20)
FULL = Plan(GPT_311M, "bf16", rounds=3, steps=1, warmup=2)
FULL_X4 = Plan(GPT_311M_X4, "bf16", rounds=2, steps=1, warmup=2, modes=("backward", "next_forward"))


def arms(plan: Plan, store: Path, device: str, in_host: bool = True) -> list[Worker]:
    """Plain torch, and overspill with its state on NVMe and, if ``in_host``, all in memory.

    The last keeps activations beside its budget; in those of the others, they count.
    """
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
    kept = store / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    options = {**small, "nvme": str(kept), "update": plan.modes[-1], "activations": "keep"}
    made.append(Worker(f"overspill, NVMe, {plan.modes[-1]}, keep", plan, device, options))
    return made


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
    comparison of its own with torch and overspill, or, where it does not start, as a row; none:
    DeepSpeed's NVMe offload, and with ``quick`` no peer.
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
        if each:
            comparisons = _each(plans[0], store, device)
    suite = "step-peers" if each else "step"
    draw_times(comparisons, folder / f"{suite}.png")
    return outcome(suite, comparisons, folder)


def _each(plan: Plan, store: Path, device: str) -> list[Comparison]:
    """Every peer beside torch and overspill; those that do not start are rows of one table."""
    plan = replace(plan, modes=("backward",), rounds=2, limit_s=PEER_LIMIT_S)
    comparisons, refused = [], []
    for name in ("torch-fp32", *PEERS):
        arm = peer(name, plan, store, device)
        try:
            arm.start()
        except RuntimeError as error:
            arm.close()
            refused.append(Row(name, {}, (), error=str(error)))
            continue
        beside = arms(plan, store, device, in_host="nvme" not in name)
        comparisons.append(_compare(plan, [*beside, arm], f"; {name}"))
    if refused:
        comparisons.append(Comparison("Peers that do not run here", {}, refused, columns(plan)))
    return comparisons
