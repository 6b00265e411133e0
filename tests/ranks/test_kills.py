"""Ranks killed at any time: the run goes on, bit for bit, on other ranks.

Under FSDP2 shards are streamed, and under DDP frozen weights.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.ranks.stores import find_run

from . import test_ddp_frozen as ddp
from .spawned import PATIENCE_S, RATES, Started, adamw, folder_of, loss_of, sharded, spawn, whole

STEPS = 400
SIZES = (1, 2, 4)  # powers of two: gradients that are the same on all ranks keep their bits
DEVICE = 160 * 1024
Weights = dict[str, torch.Tensor]


def options(kind: str, size: int) -> dict[str, Any]:
    given = {"device": "sim", "rates": RATES, "activations": "recompute"}
    if kind == "ddp":
        return {**given, **ddp.TIGHT, "host_memory": "4MiB"}
    return {**given, "device_memory": DEVICE // size, "host_memory": "600KiB"}


def made(kind: str, *, empty: bool = False) -> Any:
    return ddp.replicated(ddp.net(empty=empty)) if kind == "ddp" else sharded()


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    return ddp.adamw(model) if kind == "ddp" else adamw(model)


def all_of(kind: str, model: Any) -> Weights:
    return ddp.weights_of(model.module) if kind == "ddp" else whole(model)


def step(model: Any, optimizer: Any, number: int) -> None:
    loss_of(model, number, 0).backward()  # every rank has the same batch
    optimizer.step()
    optimizer.zero_grad()


def uninterrupted(rank: int, size: int, kind: str, until: int) -> list[Weights]:
    model = made(kind)
    found = []
    with overspill.wrap(
        model, optimizer_of(kind, model), device="cpu", host_memory="1GiB", rates=RATES
    ) as optimizer:
        for number in range(until):
            found.append(all_of(kind, model))
            step(model, optimizer, number)
    return found


def goes_on(
    rank: int, size: int, kind: str, before: Path | None, folder: Path, until: int
) -> tuple[int, Any]:
    """Trains from the last commit until the end, or until it is killed; what it began with."""
    model = made(kind, empty=True)
    inner, given = optimizer_of(kind, model), options(kind, size)
    if before is None:
        if kind == "ddp":
            given["weights"] = folder.parent / "base"
        optimizer = overspill.wrap(model, inner, nvme=folder, **given)
    else:
        optimizer, _ = overspill.resume(model, before, inner, nvme=folder, **given)
    first = optimizer._engine.step_count
    begins = all_of(kind, model)
    layout = optimizer.plan.detail.layout
    assert layout is not None and not all(home.resident for home in layout.homes)
    torch.save((first, begins), folder / f"began-{rank}.pt")
    with optimizer:
        for number in range(first, until):
            step(model, optimizer, number)
    return first, begins


def committed(folder: Path) -> bool:
    """Whether all ranks have made a commit there."""
    try:
        return find_run([folder]) is not None
    except overspill.IoError:
        return False


def kill_and_resume(tmp_path: Path, kind: str, kills: int, seed: int) -> None:
    drawn = random.Random(seed)
    ddp.save_base(folder_of(tmp_path / "base"))
    expected = spawn(1, uninterrupted, kind, STEPS)[0]
    before: Path | None = None
    reached = done = resumed = 0
    for number in range(10 * kills):
        size, folder = drawn.choice(SIZES), folder_of(tmp_path / f"{number}")
        ranks = Started(size, goes_on, kind, before, folder, STEPS)
        try:
            until = time.monotonic() + PATIENCE_S
            while not all((folder / f"began-{rank}.pt").exists() for rank in range(size)):
                assert time.monotonic() < until, ranks.answers()
                time.sleep(0.01)
            time.sleep(drawn.uniform(0, 0.8))
            ranks.kill(drawn.randrange(size))
            answers = ranks.answers()
        finally:
            ranks.end()
        assert not all(ok for ok, _ in answers), "it was killed"
        began = [torch.load(folder / f"began-{rank}.pt") for rank in range(size)]
        steps = {first for first, _ in began}
        assert len(steps) == 1, f"ranks went on from steps {steps}"
        (first,) = steps
        assert first >= reached, "a committed step was lost"
        for _, weights in began:
            for name, value in weights.items():
                assert torch.equal(value, expected[first][name]), (number, first, name)
        done, resumed = done + 1, resumed + (before is not None)
        reached = first
        if committed(folder):  # else it was killed before, and goes on from where it was
            before = folder
        if reached > STEPS - 100:
            before, reached = None, 0
        if done == kills:
            break
    assert resumed >= kills // 2


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, seed: int, kind: str) -> None:
    kill_and_resume(tmp_path, kind, 20, seed)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_few_kills(tmp_path: Path, kind: str) -> None:
    kill_and_resume(tmp_path, kind, 2, 7)
