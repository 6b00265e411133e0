"""The optimizer's pass over memory beside the others with the passes that they need.

Training in low precision hands over bf16 gradients that must be unscaled and clipped, and wants
bf16 weights back.  torch's fused AdamW and DeepSpeedCPUAdam take fp32, so a conversion, a
multiplication and a cast stand around them; ours is one pass.  DeepSpeed runs in an environment of
its own (``python -m benchmarks.peers install deepspeed``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import overspill.optim as optim
from overspill.optim import Master, Moments
from overspill.optim.bench import Case, moved_bytes
from overspill.optim.norm import accumulate, sum_of_squares

from .machine import OtherWork
from .optim_picture import draw_updates
from .process import Process
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Arm, Call, Row, Sample, run_interleaved

COEFFICIENT = 1 / 1024 * 0.7  # unscaling times clipping
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
SWEEP = "read, multiply, write (fp32)"
TORCH, DEEPSPEED = "torch fused AdamW + passes", "DeepSpeedCPUAdam + passes"
FP32, BF16, INT8 = (f"overspill, split master, {m} moments" for m in ("fp32", "bf16", "int8"))
# The most that ours may take of another's time, and the least share of the byte bound.
TIME_GOALS: Mapping[str, Mapping[str, float]] = {
    FP32: {TORCH: 0.45, DEEPSPEED: 0.45},
    INT8: {FP32: 0.75},
}
BOUND_GOALS: Mapping[str, float] = {FP32: 0.9}


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


def _around(numel: int, grad: torch.Tensor) -> Call:
    """torch's AdamW with conversion, unscaling times clipping, and the cast of the weights."""
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    param = torch.nn.Parameter(torch.randn(numel) * 0.02)
    param.grad = torch.zeros(numel)
    optimizer = torch.optim.AdamW([param], fused=True, **OPTIONS)

    def step() -> None:
        assert param.grad is not None
        param.grad.copy_(grad)
        param.grad.mul_(COEFFICIENT)
        optimizer.step()
        weight.copy_(param.detach())

    return Call(TORCH, _timed(step), {"bytes": AROUND_BYTES * numel})


AROUND_BYTES = (2 + 4) + 8 + 28 + (4 + 2)  # conversion, unscaling, AdamW, cast


class DeepSpeed:
    """DeepSpeedCPUAdam in a process of its own."""

    name = DEEPSPEED

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._process: Process | None = None

    def start(self) -> Mapping[str, Any]:
        """Starts it and takes two steps; the first time, DeepSpeed builds its extension."""
        self._process = Process("optim_deepspeed", peer="deepspeed")
        asked = {"threads": optim.threads(), "coefficient": COEFFICIENT, "options": OPTIONS}
        told = self._process.ask({"numel": self._numel, **asked})
        for _ in range(2):
            self._process.ask({})
        return {"bytes": AROUND_BYTES * self._numel, **told}

    def sample(self) -> Sample:
        assert self._process is not None
        with OtherWork() as other:
            started = time.perf_counter()
            seconds = float(self._process.ask({})["seconds"])
            wall_s = time.perf_counter() - started
        # Its own work looks like another process's.
        return Sample(seconds, {"others": max(0.0, other.share - seconds / wall_s)})

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def _ours(name: str, grad: torch.Tensor, master: Master, moments: Moments) -> Call:
    numel, dtype = grad.numel(), grad.dtype
    param = torch.nn.Parameter(torch.full((numel,), 0.02, dtype=dtype))
    param.grad = grad
    optimizer = optim.AdamW([param], **OPTIONS, master=master, moments=moments)
    fields = optimizer.rule_of(optimizer.param_groups[0]).state_fields(dtype, master, moments)
    nbytes = moved_bytes(Case("adamw", dtype, master, moments), fields, numel)
    return Call(name, _timed(lambda: optimizer.step(grad_scale=COEFFICIENT)), {"bytes": nbytes})


def _arms(numel: int, grad: torch.Tensor) -> list[Arm]:
    values = torch.ones(numel)
    return [
        _around(numel, grad),
        DeepSpeed(numel),
        Call(SWEEP, _timed(lambda: values.mul_(1.0)), {"bytes": 8 * numel, "sweep": True}),
        _ours(FP32, grad, "split", "fp32"),
        _ours(BF16, grad, "split", "bf16"),
        _ours(INT8, grad, "split", "int8"),
        _ours("overspill, fp32 master, fp32 moments", grad, "fp32", "fp32"),
        _ours("overspill, fp32 weights and gradients", grad.float(), None, "fp32"),
    ]


def _norms(numel: int, grad: torch.Tensor) -> list[Arm]:
    total = torch.zeros(numel)
    norm = lambda: torch.linalg.vector_norm(grad, dtype=torch.float64)  # noqa: E731
    return [
        Call("torch norm of bf16", _timed(norm), {"bytes": 2 * numel}),
        Call("sum_of_squares", _timed(lambda: sum_of_squares(grad)), {"bytes": 2 * numel}),
        Call("torch add_ of bf16 to fp32", _timed(lambda: total.add_(grad)), {"bytes": 10 * numel}),
        Call("accumulate", _timed(lambda: accumulate(total, grad)), {"bytes": 10 * numel}),
    ]


def over(row: Row, other: Row | None) -> float | None:
    """The median of a row's time over another's, round by round."""
    if other is None:
        return None
    pairs = zip(row.samples, other.samples, strict=False)
    ratios = [mine.seconds / theirs.seconds for mine, theirs in pairs]
    return statistics.median(ratios) if ratios else None


def bound_share(row: Row, sweep: Row | None) -> float | None:
    """The time that the row's bytes take at the sweep's rate, over the time it took."""
    ratio = None if sweep is None else over(row, sweep)
    if ratio is None or sweep is None:
        return None
    return float(row.facts["bytes"] / sweep.facts["bytes"] / ratio)


def goals(row: Row, rows: Mapping[str, Row]) -> str:
    """What the row should reach, and whether it does."""
    told = []
    for name, most in TIME_GOALS.get(row.name, {}).items():
        ratio = over(row, rows.get(name))
        if ratio is not None:
            short = name.split(",")[-1].split()[0]
            told.append(f"{ratio:.2f} of {short}, {'met' if ratio <= most else f'over {most}'}")
    share, least = bound_share(row, rows.get(SWEEP)), BOUND_GOALS.get(row.name)
    if share is not None and least is not None:
        told.append(f"bound {'met' if share >= least else f'under {least}'}")
    return "; ".join(told) or "-"


def _compare(title: str, numel: int, arms: Sequence[Arm], rounds: int) -> Comparison:
    rows = run_interleaved(arms, rounds)
    by_name = {row.name: row for row in rows}
    rates = {row.name: row.facts["bytes"] / row.median_s for row in rows if row.median_s}
    columns: list[Column] = [
        ("median", lambda row: number(row.median_s, " s")),
        ("ns/parameter", lambda row: number(row.median_s and row.median_s / numel * 1e9)),
        ("GB/s", lambda row: number(rates.get(row.name, 0.0) / 1e9)),
        ("time over the first", spread),
    ]
    if SWEEP in by_name:
        columns += [
            ("of the bound", lambda row: number(bound_share(row, by_name[SWEEP]))),
            ("goals", lambda row: goals(row, by_name)),
        ]
    settings = {
        "numel": numel, "isa": optim.native_isa(), "threads": optim.threads(),
        "torch_threads": torch.get_num_threads(), "time_goals": TIME_GOALS,
        "bound_goals": BOUND_GOALS,
    }  # fmt: skip
    return Comparison(title, settings, rows, [*columns, ("others", others)])


def run(*, quick: bool, folder: Path) -> Outcome:
    """AdamW, then norms, on 100 million parameters (quick: 8 million), with all threads.

    Takes up to 11 GB of memory; also draws ``optim.png``.
    """
    numel, rounds = (8_000_000, 7) if quick else (100_000_000, 15)
    what = f"{numel // 10**6} M parameters, {optim.native_isa()}, {optim.threads()} threads"
    grad = torch.randn(numel).bfloat16()
    updates = _compare(f"AdamW, {what}", numel, _arms(numel, grad), rounds)
    norms = _compare(f"Gradients, {what}", numel, _norms(numel, grad), rounds)
    folder.mkdir(parents=True, exist_ok=True)
    draw_updates(updates, folder / "optim.png")
    return outcome("optim", [updates, norms], folder)
