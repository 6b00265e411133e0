"""The optimizer's pass over memory beside torch's fused AdamW with the passes that it needs.

Training in low precision hands over bf16 gradients that must be unscaled and clipped, and wants
bf16 weights back.  torch's fused kernel takes fp32, so a conversion, a multiplication and a cast
stand around it; ours is one pass.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import overspill.optim as optim
from overspill.optim import Master, Moments

from .results import Column, Comparison, Outcome, number, outcome, spread
from .runner import Arm, Call, Row, run_interleaved

COEFFICIENT = 1 / 1024 * 0.7  # unscaling times clipping
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
RMW = "read, multiply, write (fp32)"


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return timed


def _gradient(numel: int) -> torch.Tensor:
    return torch.randn(numel).bfloat16()


def _around(name: str, numel: int, make: Callable[[torch.nn.Parameter], Any]) -> Call:
    """An fp32 optimizer with conversion, unscaling times clipping, and the cast of the weights."""
    grad, weight = _gradient(numel), torch.zeros(numel, dtype=torch.bfloat16)
    param = torch.nn.Parameter(torch.randn(numel) * 0.02)
    param.grad = torch.zeros(numel)
    optimizer = make(param)

    def step() -> None:
        param.grad.copy_(grad)
        param.grad.mul_(COEFFICIENT)
        optimizer.step()
        weight.copy_(param.detach())

    return Call(name, _timed(step), {"bytes": numel * (2 + 4 + 8 + 28 + 4 + 2)})


def _deepspeed(param: torch.nn.Parameter) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    return DeepSpeedCPUAdam([param], adamw_mode=True, **OPTIONS)


def _ours(name: str, numel: int, dtype: torch.dtype, master: Master, moments: Moments) -> Call:
    grad = _gradient(numel).to(dtype)
    param = torch.nn.Parameter((torch.randn(numel) * 0.02).to(dtype))
    param.grad = grad
    optimizer = optim.AdamW([param], **OPTIONS, master=master, moments=moments)
    rule = optimizer.rule_of(optimizer.param_groups[0])
    state = sum(
        2 * field.elements(numel) * field.dtype.itemsize
        for field in rule.state_fields(dtype, master, moments)
    )
    # With a whole master the weight is only written.
    weight = (1 if master == "fp32" else 2) * numel * dtype.itemsize
    nbytes = state + weight + numel * dtype.itemsize
    return Call(name, _timed(lambda: optimizer.step(grad_scale=COEFFICIENT)), {"bytes": nbytes})


def _arms(numel: int) -> list[Arm]:
    fused: Callable[[torch.nn.Parameter], Any] = lambda p: torch.optim.AdamW(  # noqa: E731
        [p], fused=True, **OPTIONS
    )
    values = torch.ones(numel)
    half, single = torch.bfloat16, torch.float32
    arms: list[Arm] = [_around("torch fused AdamW + passes", numel, fused)]
    if importlib.util.find_spec("deepspeed") is not None:
        arms.append(_around("DeepSpeedCPUAdam + passes", numel, _deepspeed))
    return [
        *arms,
        Call(RMW, _timed(lambda: values.mul_(1.0)), {"bytes": 8 * numel}),
        _ours("overspill, split master, fp32 moments", numel, half, "split", "fp32"),
        _ours("overspill, split master, bf16 moments", numel, half, "split", "bf16"),
        _ours("overspill, split master, int8 moments", numel, half, "split", "int8"),
        _ours("overspill, fp32 master, fp32 moments", numel, half, "fp32", "fp32"),
        _ours("overspill, fp32 weights and gradients", numel, single, None, "fp32"),
    ]


def _norms(numel: int) -> list[Arm]:
    grad, total = _gradient(numel), torch.zeros(numel)
    norm = lambda: torch.linalg.vector_norm(grad, dtype=torch.float64)  # noqa: E731
    return [
        Call("torch norm of bf16", _timed(norm), {"bytes": 2 * numel}),
        Call("sum_of_squares", _timed(lambda: optim.sum_of_squares(grad)), {"bytes": 2 * numel}),
        Call("torch add_ of bf16 to fp32", _timed(lambda: total.add_(grad)), {"bytes": 10 * numel}),
        Call("accumulate", _timed(lambda: optim.accumulate(total, grad)), {"bytes": 10 * numel}),
    ]


def _compare(title: str, numel: int, arms: list[Arm], rounds: int) -> Comparison:
    rows = run_interleaved(arms, rounds)
    rates = {row.name: row.facts["bytes"] / row.median_s for row in rows if row.median_s}

    def share(row: Row) -> str:
        if RMW not in rates or row.name not in rates:
            return "-"
        return number(rates[row.name] / rates[RMW])

    columns: list[Column] = [
        ("median", lambda row: number(row.median_s, " s")),
        ("ns/parameter", lambda row: number(row.median_s and row.median_s / numel * 1e9)),
        ("GB/s", lambda row: number(rates.get(row.name, 0.0) / 1e9)),
        ("of read-modify-write", share),
        ("time over the first", spread),
    ]
    settings = {"numel": numel, "isa": optim.native_isa(), "threads": optim.threads()}
    return Comparison(title, settings, rows, columns)


def run(*, quick: bool, folder: Path) -> Outcome:
    """AdamW, then norms, on 100 million parameters (quick: 16 million), with all threads."""
    numel, rounds = (16_000_000, 7) if quick else (100_000_000, 9)
    what = f"{numel // 10**6} M parameters, {optim.native_isa()}, {optim.threads()} threads"
    return outcome(
        "optim",
        [
            _compare(f"AdamW, {what}", numel, _arms(numel), rounds),
            _compare(f"Gradients, {what}", numel, _norms(numel), rounds),
        ],
        folder,
    )
