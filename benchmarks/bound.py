"""Step time over its lower bound, with each lane in turn the slowest: does the schedule overlap?

Runs on ``sim`` at rates so slow that a loaded machine hardly matters: every lane but one needs a
share of the chosen time, that one all of it, and what is measured is the schedule alone.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill.schedule.bounds import step_bound, step_flops, trained_params

from .model import Gpt, Shape, batch_of
from .results import Column, Comparison, Outcome, number, outcome
from .runner import Row, Sample

LANES = ("compute", "copy_in", "copy_out", "read", "write", "update")
HIDDEN = ("copy_in", "copy_out", "read", "write", "update")
MODES = ("step", "backward", "next_forward")
DEEP = Shape(layers=32, width=128, heads=4, vocabulary=256, batch=1, tokens=16)


@dataclass(frozen=True)
class Slowness:
    """A machine for one model: ``lane`` needs ``seconds`` a step, all others ``share`` of that."""

    lane: str
    seconds: float = 1.5
    share: float = 0.5


@dataclass(frozen=True)
class Efficiency:
    """What was measured, per step.  ``covered``: share of moves and updates under compute."""

    step_s: float
    bound_s: float
    covered: float
    stalls: Mapping[str, float]
    all_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.step_s / self.bound_s


def budgets(shape: Shape) -> dict[str, Any]:
    """Options under which everything lives on disk and a third of the model's weights in memory."""
    params = sum(p.numel() for p in meta_model(shape).parameters())
    return {"device_memory": params * 2 // 3, "host_memory": params * 3, "durable": False}


def meta_model(shape: Shape) -> Gpt:
    """The model without memory, in bf16."""
    with torch.device("meta"):
        return Gpt(shape).to(torch.bfloat16)


def machine_for(
    model: torch.nn.Module, tokens: int, slow: Slowness, **options: Any
) -> overspill.Rates:
    """The rates at which every lane needs its share of the time, for this model and placement."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = overspill.plan(model, optimizer, rates=overspill.Rates(), device="sim", **options)
    assert plan.fits and plan.layout is not None, plan.shortfalls

    def rate(lane: str, amount: float) -> float | None:
        share = 1.0 if lane == slow.lane else slow.share
        return amount / (slow.seconds * share) if amount else None

    return overspill.Rates(
        h2d_bytes_s=rate("copy_in", plan.link_bytes["copy_in"]),
        d2h_bytes_s=rate("copy_out", plan.link_bytes["copy_out"]),
        disk_read_bytes_s=rate("read", plan.link_bytes["read"]),
        disk_write_bytes_s=rate("write", plan.link_bytes["write"]),
        update_params_s=rate("update", trained_params(plan.layout)),
        device_flops_s=rate("compute", step_flops(plan.layout.units, tokens)),
    )


def measure(
    shape: Shape, update: str, slow: Slowness, *, steps: int = 3, warmup: int = 2
) -> Efficiency:
    """Trains on the machine that ``slow`` describes."""
    with tempfile.TemporaryDirectory() as store:
        options = {**budgets(shape), "nvme": store, "update": update}
        meta = meta_model(shape)
        rates = machine_for(meta, shape.tokens_per_step, slow, **options)
        torch.manual_seed(0)
        model = Gpt(shape).to(torch.bfloat16)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with overspill.wrap(model, adamw, device="sim", rates=rates, **options) as optimizer:
            for step in range(warmup + steps):
                model(batch_of(shape, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            engine = model.__dict__["_overspill_engine"]
            marks = engine.trace.steps[-steps:]
            plan = optimizer.plan
            all_s = tuple((m.finished_ns - m.started_ns) / 1e9 for m in marks)
            bound = step_bound(
                plan.layout, plan.link_bytes, rates, update=update, tokens=shape.tokens_per_step
            )
            window = marks[0].started_ns, marks[-1].finished_ns
            stalls = dict.fromkeys(LANES, 0.0)
            for stall in engine.trace.stalls(*window):
                stalls[stall.lane] += (stall.finished_ns - stall.started_ns) / 1e9 / steps
            return Efficiency(
                statistics.median(all_s), bound.seconds,
                engine.trace.covered_share(HIDDEN, *window), stalls, all_s,
            )  # fmt: skip


def _row(update: str, slow: Slowness, steps: int) -> Row:
    name = f"{update}, {slow.lane}"
    try:
        seen = measure(DEEP, update, slow, steps=steps)
    except Exception as error:  # an arm that fails is a row with its error
        return Row(name, {}, (), error=f"{type(error).__name__}: {error}")
    about = {"bound_s": seen.bound_s, "covered": seen.covered, "stalls": seen.stalls}
    samples = tuple(Sample(s, about) for s in seen.all_s)
    ratios = [s / seen.bound_s for s in seen.all_s]
    return Row(
        name, {}, samples, None, seen.step_s, statistics.median(ratios), min(ratios), max(ratios)
    )


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite: each way to update, with each lane in turn the slowest."""
    seconds, steps = (0.6, 2) if quick else (1.5, 3)
    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("bound", lambda row: number(row.samples[-1].seen["bound_s"] if row.samples else None)),
        ("over bound", lambda row: number(row.ratio)),
        (
            "under compute",
            lambda row: f"{row.samples[-1].seen['covered']:.0%}" if row.samples else "-",
        ),
        ("waits for", _waits),
    ]
    slow = [Slowness(lane, seconds) for lane in LANES]
    comparisons = [
        Comparison(
            f"Step time over its bound, update='{update}'",
            {"seconds": seconds, "steps": steps},
            [_row(update, each, steps) for each in slow],
            columns,
        )
        for update in MODES
    ]
    return outcome("bound", comparisons, folder)


def _waits(row: Row) -> str:
    stalls = row.samples[-1].seen["stalls"] if row.samples else {}
    named = sorted(((s, lane) for lane, s in stalls.items() if s >= 0.02), reverse=True)
    return ", ".join(f"{lane} {s:.2f} s" for s, lane in named) or "nothing"
