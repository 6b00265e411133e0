"""Compares recomputation that may keep the outputs of attention with that of whole units, on
randomly drawn machines.

Steps are measured with real compute, on one core, while the links of ``sim`` have drawn rates; and
they are planned, for larger models on a real card.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import overspill
from overspill.engine import engine_of
from overspill.facts.machine import Machine
from overspill.planning import recompute_choice
from overspill.train.choices import model_for
from overspill.train.skeletons import skeleton_adamw

from .drawn_activations import Stack
from .model import Shape, batch_of
from .results import Column, Comparison, number
from .runner import Row, Sample

GOAL, BETTER, SHARE = 1.0, 0.95, 1 / 3
SETTLED_STEPS, STEPS = 7, 3
MACHINE_FILE = Path(__file__).parents[1] / "examples/machines/rtx4090.toml"
KEPT_WIDTHS = 17  # tensors as wide as the model that autograd keeps of a layer


@dataclass(frozen=True)
class Drawn:
    """A model, and budgets and rates for it."""

    shape: Shape
    options: dict[str, Any]


@contextmanager
def _one_core() -> Iterator[None]:
    """Leave the other core to the copies, in place of a GPU's copy engines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(model: Stack, optimizer: Any, shape: Shape, steps: int) -> list[float]:
    seconds = []
    for step in range(steps):
        started_s = time.perf_counter()
        model(batch_of(shape, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started_s)
    return seconds


def draw(seed: int) -> Drawn:
    """Draw a machine, whose rates are relative to the measured time of a step in memory.

    A PCIe 4 link (25 GB/s) carries the activations of an 8 B model on an RTX 4090 in about 0.4 of
    the time of compute.
    """
    rng = random.Random(seed)
    shape = Shape(rng.randint(4, 6), 256, 4, 256, 1, rng.choice([2048, 3072, 4096]))
    torch.manual_seed(0)
    model = Stack(shape)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    compute_s = statistics.median(_train(model, plain, shape, 3)[1:])
    weights = 4 * sum(p.numel() for p in model.parameters())
    kept = KEPT_WIDTHS * 4 * shape.width * shape.tokens_per_step * shape.layers
    link = kept / (compute_s * rng.uniform(0.15, 1.5))
    rates = overspill.Rates(
        h2d_bytes_s=link, d2h_bytes_s=link, dram_bytes_s=2e10, update_params_s=1e9,
        disk_read_bytes_s=link / 4, disk_write_bytes_s=link / 4,
    )  # fmt: skip
    return Drawn(shape, {
        "device": "sim", "rates": rates, "durable": False, "activations": "auto",
        "device_memory": int(weights * 1.5 + kept * rng.uniform(0.25, 0.6)),
        "host_memory": int(weights * 6 + kept * rng.uniform(0.3, 1.2)),
    })  # fmt: skip


def measure(machine: Drawn, *, parts: bool) -> Sample:
    """Steps under ``"auto"``, once it has settled.

    Args:
        parts: whether it may keep the outputs of attention.
    """
    torch.manual_seed(0)
    model = Stack(machine.shape)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept = recompute_choice._keep_attention if parts else lambda *_: None
    with (
        tempfile.TemporaryDirectory() as store,
        mock.patch.object(recompute_choice, "_keep_attention", kept),
        overspill.wrap(model, adamw, nvme=store, **machine.options) as optimizer,
    ):
        seconds = _train(model, optimizer, machine.shape, SETTLED_STEPS + STEPS)[-STEPS:]
        engine = engine_of(model)
        assert engine is not None
        adapted = engine._loop.tuner.adapted()
    chosen = recompute_choice.NOTHING if adapted is None else adapted[0]
    seen = {"recomputed": len(chosen.units), "keep_attention": len(chosen.keep_attention)}
    return Sample(statistics.median(seconds), seen)


def compared(seeds: int) -> Comparison:
    """Return a row per seed: the time with parts of units over that of whole units, which are
    measured before and after it."""
    rows = []
    with _one_core():
        for seed in range(seeds):
            machine = draw(seed)
            before = measure(machine, parts=False)
            parts = measure(machine, parts=True)
            wholes = [before, measure(machine, parts=False)]
            whole_s = statistics.mean(sample.seconds for sample in wholes)
            facts = {"whole_s": [s.seconds for s in wholes], "tokens": machine.shape.tokens}
            ratio = parts.seconds / whole_s
            rows.append(
                Row(f"{seed}", facts, (parts, *wholes), median_s=parts.seconds, ratio=ratio)
            )
    return _comparison("Drawn machines", rows)


def planned(seeds: int) -> Comparison:
    """Return a row per seed: planned steps of language models on a card behind a PCIe 4 link."""
    rng = random.Random(0)
    machine = Machine.from_file(MACHINE_FILE)
    rows = []
    for _ in range(seeds):
        name = rng.choice(["llama-1b", "llama-3b", "llama-8b"])
        tokens, host = rng.choice([8, 16, 32, 64, 128]) << 10, rng.choice([32, 64, 128])
        card = rng.choice([16, 24, 48])
        found = []
        for kept in (lambda *_: None, recompute_choice._keep_attention):
            model = model_for(name, None, None, tokens).to(torch.bfloat16)
            with mock.patch.object(recompute_choice, "_keep_attention", kept):
                plan = overspill.plan(
                    model, skeleton_adamw(model), machine=machine, tokens=tokens, loss="auto",
                    tile="auto", device_memory=f"{card * 0.75}GB", host_memory=f"{host * 0.85}GB",
                    nvme="/scratch", nvme_memory="1500GB",
                )  # fmt: skip
            assert plan.step_s is not None
            saved = plan.detail.layout.saved
            seen = {"recomputed": len(saved.recompute), "keep_attention": len(saved.keep_attention)}
            found.append(Sample(plan.step_s, seen))
        whole, parts = found
        facts = {"tokens": tokens, "whole_s": [whole.seconds]}
        ratio = parts.seconds / whole.seconds
        rows.append(
            Row(
                f"{name}, {card} GB and {host} GB",
                facts,
                (parts, whole),
                None,
                parts.seconds,
                ratio,
            )
        )
    return _comparison("Planned steps on an RTX 4090 (PCIe 4) with drawn memory", rows)


def _comparison(what: str, rows: list[Row]) -> Comparison:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    title = (
        f"{what}: auto that may keep the outputs of attention over auto by whole units, at "
        f"most {max(ratios):.2f} (goal {GOAL}), at most {BETTER} in "
        f"{sum(r <= BETTER for r in ratios)} of {len(rows)} (goal {SHARE:.0%})"
    )
    columns: list[Column] = [
        ("tokens", lambda row: str(row.facts["tokens"])),
        ("with parts", lambda row: number(row.median_s, " s")),
        ("whole units", lambda r: number(statistics.mean(r.facts["whole_s"]), " s")),
        ("ratio", lambda row: number(row.ratio)),
        ("recomputed", lambda r: str(r.samples[0].seen["recomputed"])),
        ("attention kept", lambda r: str(r.samples[0].seen["keep_attention"])),
        ("recomputed, whole", lambda r: str(r.samples[1].seen["recomputed"])),
    ]
    return Comparison(title, {"ratios": ratios}, rows, columns)
