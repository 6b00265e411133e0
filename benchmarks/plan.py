"""Plans against runs on this machine's own disk and processors: the step time foretold against the
one measured, and the placement chosen against random ones that are as legal."""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import overspill
from overspill.blueprints import make_blueprint
from overspill.planning.plan import Preference
from overspill.plans import make_plan

from .model import Gpt, Shape, batch_of
from .results import Column, Comparison, Outcome, number, outcome
from .runner import Row, Sample
from .step import GPT_311M, SMALL

KINDS = ("weights", "gradients", "state")
MODE = "next_forward"  # the default
PLAN_GOAL, DRAWN_GOAL = 0.15, 1.05
DRAWN_S = 300.0  # random placements that would end later are left out


@dataclass(frozen=True)
class Size:
    """How much is run.

    ``budgets``: shares of the model's 14 bytes per parameter (weights, gradients and state) that
    host memory may hold.  ``drawn``: random placements, under the budget ``drawn_budget``, with
    ``short`` as the batch, so that the placement and not compute decides.
    """

    shape: Shape
    budgets: tuple[float, ...]
    steps: int
    drawn: int
    drawn_budget: float
    short: Shape


FULL = Size(GPT_311M, (0.12, 0.3, 0.6), 3, 20, 0.3, replace(GPT_311M, batch=1, tokens=64))
QUICK = Size(SMALL, (0.3, 0.6), 3, 3, 0.4, SMALL)


def _model(shape: Shape) -> Gpt:
    """The model in bf16 with noise for weights, the same few again and again: drawing them all
    would take longer than the steps."""
    with torch.device("meta"):
        model = Gpt(shape).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    noise = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    noise = noise.to(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            flat = p.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()
    return model


def _options(shape: Shape, share: float, store: str) -> dict[str, Any]:
    with torch.device("meta"):
        params = sum(p.numel() for p in Gpt(shape).parameters())
    return {
        "device": "cpu", "host_memory": int(14 * params * share), "nvme": store,
        "durable": False, "update": MODE,
    }  # fmt: skip


def planned(shape: Shape, options: dict[str, Any]) -> overspill.Plan:
    """The plan with one step of the model, in memory, as the example.  The machine is measured
    anew: what is remembered of it may be of another mood."""
    model = _model(shape)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return make_plan(
        model, adamw, options, measure=True, example=lambda: model(batch_of(shape, 0)),
        every_update=False,
    )  # fmt: skip


def measured(
    shape: Shape, options: dict[str, Any], prefer: Preference | None, steps: int, warmup: int
) -> tuple[overspill.Plan, list[float]]:
    """The seconds of each step of a run under the same plan."""
    model = _model(shape)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with (
        mock.patch("overspill.wrapping.make_blueprint", partial(make_blueprint, prefer=prefer)),
        overspill.wrap(model, adamw, **options) as optimizer,
    ):
        seconds = [_step(model, optimizer, shape, step) for step in range(warmup + steps)]
        return optimizer.plan, seconds[warmup:]


def _step(model: Gpt, optimizer: Any, shape: Shape, step: int) -> float:
    started = time.perf_counter()
    model(batch_of(shape, step)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started


def _against_plan(size: Size, store: str) -> list[Row]:
    rows = []
    for share in size.budgets:
        options = _options(size.shape, share, store)
        plan = planned(size.shape, options)
        assert plan.fits and plan.detail.layout is not None and plan.step_s is not None, (
            plan.shortfalls
        )
        ran, seconds = measured(size.shape, options, None, size.steps, 2)
        assert ran.placement == plan.placement, "the run follows the plan"
        median = statistics.median(seconds)
        about = {"plan_s": plan.step_s, "bound_s": plan.bound_s}
        samples = tuple(Sample(s, about) for s in seconds)
        facts = {"depth": plan.detail.layout.prefetch_depth}
        name = f"{share:.0%} in host memory"
        rows.append(Row(name, facts, samples, None, median, plan.step_s / median))
        gc.collect()
    return rows


def draw(seed: int, units: int) -> Preference:
    """A placement that is legal like any other."""
    rng = random.Random(seed)
    order, kinds = list(range(units)), list(KINDS)
    rng.shuffle(order)
    rng.shuffle(kinds)
    return Preference(tuple(kinds), tuple(order), rng.uniform(0.5, 1.0))


def _against_drawn(size: Size, store: str) -> list[Row]:
    options = _options(size.short, size.drawn_budget, store)
    plan = planned(size.short, options)
    assert plan.detail.layout is not None
    rng = random.Random(0)
    arms: list[tuple[str, Preference | None, int]] = [
        ("chosen", plan.detail.preference, plan.detail.layout.prefetch_depth),
        *(
            (
                f"drawn {seed}",
                draw(seed, len(plan.detail.layout.units)),
                rng.choice([1, 2, 3, 4, 6]),
            )
            for seed in range(size.drawn)
        ),
    ]
    rows: list[Row] = []
    begun, longest_s = time.monotonic(), 0.0
    for name, prefer, depth in arms:
        started = time.monotonic()
        if len(rows) > 3 and started - begun + 2 * longest_s > DRAWN_S:
            break
        given = {**options, "prefetch_depth": depth}
        ran, seconds = measured(size.short, given, prefer, 2, 2)
        about = {"plan_s": ran.step_s, "read_bytes": ran.link_bytes["read"]}
        samples = tuple(Sample(s, about) for s in seconds)
        rows.append(Row(name, {"depth": depth}, samples, None, min(seconds)))
        gc.collect()
        longest_s = max(longest_s, time.monotonic() - started)
    # The chosen one once more at the end, so that the machine's moods show.
    again = measured(size.short, {**options, "prefetch_depth": arms[0][2]}, arms[0][1], 2, 2)[1]
    samples = (*rows[0].samples, *(Sample(s) for s in again))
    rows[0] = replace(rows[0], samples=samples, median_s=min(s.seconds for s in samples))
    return rows


def _seen(name: str) -> Callable[[Row], Any]:
    return lambda row: row.samples[0].seen.get(name) if row.samples else None


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite: about six minutes; ``quick``: half a minute, with a tiny model."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(
        dir=folder.parent if folder.parent.is_dir() else None
    ) as store:
        ours, drawn = _against_plan(size, store), _against_drawn(size, store)
    worst = max(abs(row.ratio - 1) for row in ours if row.ratio is not None)
    best = min(row.median_s for row in drawn[1:] if row.median_s is not None)
    assert drawn[0].median_s is not None
    over = drawn[0].median_s / best
    plan_columns: list[Column] = [
        ("measured", lambda row: number(row.median_s, " s")),
        ("planned", lambda row: number(_seen("plan_s")(row), " s")),
        ("ratio", lambda row: number(row.ratio)),
        ("bound", lambda row: number(_seen("bound_s")(row), " s")),
    ]
    drawn_columns: list[Column] = [
        ("measured, best step", lambda row: number(row.median_s, " s")),
        ("read a step", lambda row: number((_seen("read_bytes")(row) or 0) / 2**30, " GiB")),
    ]
    return outcome(
        "plan",
        [
            Comparison(
                f"Planned step time over measured, update='{MODE}': {worst:.0%} off at most "
                f"(goal {PLAN_GOAL:.0%})",
                {"budgets": size.budgets, "steps": size.steps}, ours, plan_columns,
            ),
            Comparison(
                f"The placement chosen takes {over:.2f} times the best of {len(drawn) - 1} "
                f"random ones (goal {DRAWN_GOAL:.2f})",
                {"budget": size.drawn_budget}, drawn, drawn_columns,
            ),
        ],
        folder,
    )  # fmt: skip
