"""Policies for activations on machines drawn by a seed: each trains the same model on ``sim``."""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import overspill
from overspill.engine import engine_of
from overspill.facts.tier import Tier
from overspill.planning.choose import run_steps
from overspill.planning.coarse import coarsen
from overspill.planning.recompute_choice import with_recompute

from .model import Shape, batch_of
from .results import Column, Comparison, number
from .runner import Row, Sample

UNIFORM = ("keep", "host", "nvme", "recompute")
GOAL, BETTER = 1.03, 0.97
WARM_STEPS, STEPS = 3, 2
SETTLED_STEPS = 8  # of "auto", which looks at its choice up to four times


class Stack(nn.Module):
    """A language model of torch's own layers, of which ``auto`` knows that they compute the same
    twice."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.tokens = nn.Embedding(shape.vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, shape.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(shape.layers)
        )
        self.head = nn.Linear(width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, tokens + 1), int64."""
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Drawn:
    """A model, and a machine whose link and disk carry activations in part of compute's time."""

    shape: Shape
    rates: overspill.Rates
    device_memory: int
    host_memory: int


def draw(seed: int) -> Drawn:
    """By a seed: compute takes about two seconds a step, so that this machine keeps up."""
    rng = random.Random(seed)
    shape = Shape(rng.randint(5, 8), 256, 4, 256, 1, rng.choice([1024, 1536]))
    params = sum(p.numel() for p in Stack(shape).parameters())
    flops = 6 * params * shape.tokens_per_step
    kept = 17 * 4 * shape.width * shape.tokens_per_step * shape.layers  # bytes, about
    compute_s = rng.uniform(1.5, 2.5)
    link = kept / (compute_s * rng.uniform(0.15, 1.5))
    disk = link * rng.uniform(0.15, 0.6)
    weights = 4 * params
    return Drawn(
        shape,
        overspill.Rates(
            h2d_bytes_s=link, d2h_bytes_s=link, dram_bytes_s=2e10, update_params_s=params / 0.2,
            device_flops_s=flops / compute_s, disk_read_bytes_s=disk, disk_write_bytes_s=disk,
        ),
        int(weights * 1.2 + kept * rng.uniform(0.25, 1.1)),
        int(weights * 5 + kept * rng.uniform(0.2, 1.2)),
    )  # fmt: skip


def measure(drawn: Drawn, policy: str) -> Sample | None:
    """Steps under a policy; ``None``: it has no room."""
    torch.manual_seed(0)
    model = Stack(drawn.shape)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as store:
        options: dict[str, Any] = {
            "device": "sim", "device_memory": drawn.device_memory,
            "host_memory": drawn.host_memory, "nvme": store, "durable": False,
            "rates": drawn.rates, "activations": policy,
        }  # fmt: skip
        try:
            with overspill.wrap(model, adamw, **options) as optimizer:
                for step in range((SETTLED_STEPS if policy == "auto" else WARM_STEPS) + STEPS):
                    model(batch_of(drawn.shape, step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seconds.append(optimizer.stats.step_s)
                seen = _seen(drawn, model, optimizer)
        except overspill.BudgetError:
            return None
    return Sample(statistics.median(seconds[-STEPS:]), seen)


def _seen(drawn: Drawn, model: Stack, optimizer: Any) -> dict[str, Any]:
    held = optimizer.memory[Tier.DEVICE]
    seen: dict[str, Any] = {
        "over_bytes": max(0, held.peak_bytes - held.budget_bytes), "held_bytes": held.held_bytes
    }  # fmt: skip
    engine = engine_of(model)
    assert engine is not None
    adapted = engine._loop.tuner.adapted()
    if adapted is not None:
        chosen, costs = adapted
        blueprint = engine.runtime.blueprint
        layout = coarsen(with_recompute(blueprint.layout, chosen))
        seen["recomputed"], seen["saved_bytes"] = len(chosen.units), sum(costs.saved_bytes)
        seen["keep_attention"] = len(chosen.keep_attention)
        seen["simulated_s"] = run_steps(layout, costs, blueprint.needs).step_s
    return seen


def compared(seeds: int) -> Comparison:
    """A row a seed: ``auto`` over the best of the uniform policies that have room."""
    rows = []
    for seed in range(seeds):
        drawn = draw(seed)
        found = {policy: measure(drawn, policy) for policy in (*UNIFORM, "auto")}
        auto = found.pop("auto")
        assert auto is not None, "auto has no room"
        kept = auto.seen.get("saved_bytes", 0)
        fit = {
            name: sample.seconds for name, sample in found.items()
            if sample is not None and not sample.seen["over_bytes"]
            and (name != "keep" or sample.seen["held_bytes"] + kept <= drawn.device_memory)
        }  # fmt: skip
        best = min(fit, key=lambda name: fit[name], default="none")
        ratio = auto.seconds / fit[best] if fit else None
        facts = {"best": best, "uniform_s": fit}
        rows.append(Row(f"{seed}", facts, (auto,), median_s=auto.seconds, ratio=ratio))
    ratios = [row.ratio for row in rows if row.ratio is not None]
    errors = [
        abs(row.samples[0].seen["simulated_s"] / row.samples[0].seconds - 1)
        for row in rows if "simulated_s" in row.samples[0].seen
    ]  # fmt: skip
    title = (
        f"Drawn machines: auto over the best uniform policy that has room, at most "
        f"{max(ratios, default=0):.2f} (goal {GOAL}), under {BETTER} in "
        f"{sum(r < BETTER for r in ratios)} of {len(rows)}; simulated within "
        f"{statistics.median(errors) if errors else 0:.1%} at the median"
    )
    columns: list[Column] = [
        ("auto", lambda row: number(row.median_s, " s")),
        ("best other", lambda row: str(row.facts["best"])),
        ("ratio", lambda row: number(row.ratio)),
        ("simulated", lambda r: number(r.samples[0].seen.get("simulated_s"), " s")),
        ("recomputed", lambda r: str(r.samples[0].seen.get("recomputed", "-"))),
        ("over the budget", lambda r: number(r.samples[0].seen["over_bytes"] / (1 << 20), " MiB")),
    ]
    return Comparison(title, {"errors": errors, "ratios": ratios}, rows, columns)
