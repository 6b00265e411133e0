"""What wrapping itself costs: a model that fits, wrapped with everything resident, beside itself.

All arms run in this process and take turns.  The gain of ``torch.compile`` is measured without and
with the engine, and wrapping a model whose state goes to disk is timed beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

import overspill
from overspill.engine import engine_of
from overspill.optim import AdamW

from .arms import parameters
from .model import Gpt, Shape, batch_of
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Arm, Call, Row, run_interleaved
from .step import GPT_311M, SMALL

FITS = Shape(layers=8, width=256, heads=4, vocabulary=2048, batch=4, tokens=128)
MODES = ("step", "backward", "next_forward")
ROUNDS = 50  # pairs differ by a fifth: fewer would not show three percent


def _train(
    name: str, model: Gpt, optimizer: torch.optim.Optimizer, shape: Shape, steps: int
) -> Arm:
    """A sample begins after one step of its own and ends before its last update has landed, which
    is waited for apart: each step bears one update, and none falls into another arm's time."""
    done = [0]

    def step() -> None:
        model(batch_of(shape, done[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
        done[0] += 1

    def run() -> float:
        step()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - started
        if (engine := engine_of(model)) is not None:
            engine.quiesce()
        return seconds / steps

    run()
    return Call(name, run)


def _model(shape: Shape) -> Gpt:
    torch.manual_seed(0)
    return Gpt(shape)


def resident(shape: Shape, rounds: int, steps: int) -> Comparison:
    """Steps of the unwrapped model, by torch's AdamW and by ours, and of the wrapped one."""
    plain, ours = _model(shape), _model(shape)
    arms = [
        _train("torch AdamW", plain, torch.optim.AdamW(plain.parameters()), shape, steps),
        _train("overspill AdamW", ours, AdamW(ours.parameters()), shape, steps),
    ]
    wrapped = []
    for update in MODES:
        model = _model(shape)
        adamw = torch.optim.AdamW(model.parameters())
        optimizer = overspill.wrap(model, adamw, host_memory="2GiB", update=update)
        wrapped.append(optimizer)
        arms.append(_train(f"wrapped, {update}", model, optimizer, shape, steps))
    try:
        rows = run_interleaved(arms, rounds)
    finally:
        for optimizer in wrapped:
            optimizer.close()
    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("over torch", spread),
        ("others", others),
    ]
    return Comparison(
        f"A step with everything resident, {shape.tokens_per_step} tokens",
        {"steps": steps},
        rows,
        columns,
    )


def compiled(shape: Shape, rounds: int, steps: int) -> Comparison:
    """What ``torch.compile`` of each block gains, without the engine and with it.

    The table has the gain: the time over that of the same arm without ``torch.compile``, round by
    round.
    """
    arms, wrapped = [], []
    for engine in (False, True):
        for fast in (False, True):
            model = _model(shape)
            optimizer: torch.optim.Optimizer = AdamW(model.parameters())
            if engine:
                adamw = torch.optim.AdamW(model.parameters())
                optimizer = overspill.wrap(model, adamw, device="cpu", host_memory="2GiB")
                wrapped.append(optimizer)
            if fast:
                for block in model.blocks:
                    block.compile()
            name = f"{'wrapped' if engine else 'not wrapped'}{', compiled' if fast else ''}"
            arms.append(_train(name, model, optimizer, shape, steps))
    try:
        rows = run_interleaved(arms, rounds)
    finally:
        for each in wrapped:
            each.close()
    eager = {row.name: row for row in rows}

    def gain(row: Row) -> str:
        usual = eager[row.name.removesuffix(", compiled")]
        pairs = zip(row.samples, usual.samples, strict=True)
        return number(statistics.median(one.seconds / other.seconds for one, other in pairs))

    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("over eager", gain),
        ("over the first", spread),
        ("others", others),
    ]
    return Comparison(
        f"torch.compile of each block, {shape.tokens_per_step} tokens", {"steps": steps}, rows,
        columns,
    )  # fmt: skip


def wrapping(shape: Shape, rounds: int) -> Comparison:
    """Seconds that ``wrap`` takes, weights and zeroed state on disk."""
    params = parameters(shape)

    def run() -> float:
        with tempfile.TemporaryDirectory() as store:
            copy = Gpt(shape).to(torch.bfloat16)
            adamw = torch.optim.AdamW(copy.parameters())
            started = time.perf_counter()
            optimizer = overspill.wrap(
                copy, adamw, host_memory=max(params * 4, 64 << 20), nvme=store, durable=False
            )
            seconds = time.perf_counter() - started
            optimizer.close()
        return seconds

    rows = run_interleaved([Call("wrap", run)], rounds)
    columns: list[Column] = [
        ("time", lambda row: number(row.median_s, " s")),
        ("range", _range),
        ("others", others),
    ]
    return Comparison(f"wrap() of {params / 1e6:.0f} M parameters", {}, rows, columns)


def _range(row: Row) -> str:
    seconds = [sample.seconds for sample in row.samples]
    return f"{min(seconds):.2f}-{max(seconds):.2f} s" if seconds else "-"


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite."""
    comparisons = [
        resident(SMALL if quick else FITS, 2 if quick else ROUNDS, 1 if quick else 2),
        compiled(SMALL if quick else FITS, 2 if quick else ROUNDS // 2, 1 if quick else 2),
        wrapping(SMALL if quick else GPT_311M, 2 if quick else 3),
    ]
    return outcome("overhead", comparisons, folder)
