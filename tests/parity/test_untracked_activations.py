"""Where much less is saved than there is room for, what is saved is counted and no more, until more
comes: bits, budgets and errors are those of before."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.activations import offloader
from overspill.facts.tier import Tier
from tests.devices import CPU, NAME, normal
from tests.models import adamw, weights

WIDTH = 64


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


ROOM = Tier.DEVICE if NAME else Tier.HOST  # that activations are in


def wrapped(folder: Path, room: str = "10MiB", **options: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    folder.mkdir(exist_ok=True)
    budgets = {"host_memory": "10MiB", f"{ROOM.value}_memory": room}
    options = {**budgets, "device": CPU, "durable": False, **options}
    return model, overspill.wrap(model, adamw(model), nvme=folder, **options)


def offloader_of(optimizer: Any) -> Any:
    return optimizer._engine._loop.tuner.saved_offloader


def step(model: nn.Module, optimizer: Any, seed: int, rows: int) -> float:
    loss = model(normal(seed, rows, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def moved(optimizer: Any) -> int:
    """Bytes of what autograd saved that have left."""
    spans = optimizer._engine.trace.spans()
    return sum(s.nbytes for s in spans if s.lane == "copy_out" and s.name.startswith("saved"))


ROWS = [16, 16, 16, 16, 3000, 16, 16, 16, 2000, 2000, 16, 16]


def test_more_than_there_is_room_for_leaves_all_the_same(tmp_path: Path) -> None:
    found = []
    for policy in ("keep", "auto"):
        room = {"keep": "200MiB", "auto": "10MiB"}[policy]
        model, optimizer = wrapped(tmp_path / policy, room, activations=policy)
        losses, rests = [], []
        for seed, rows in enumerate(ROWS):
            losses.append(step(model, optimizer, seed, rows))
            if policy == "auto":
                rests.append(offloader_of(optimizer).resting.rest is not None)
                assert optimizer.memory[ROOM].peak_bytes <= 10 << 20
                if rows == 16 and not any(r > 16 for r in ROWS[:seed]):
                    assert moved(optimizer) == 0
        if policy == "auto":
            assert rests == [rows == 16 for rows in ROWS]
            assert moved(optimizer) > 0
        found.append((losses, weights(model)))
        optimizer.close()
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


def test_the_budget_holds_beside_what_a_rest_has_taken(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    for seed, rows in enumerate([150, 150, 150, 1500, 150, 1500, 1500]):
        assert (offloader_of(optimizer).resting.aside_bytes > 1 << 20) == (seed in (1, 2, 3, 5))
        step(model, optimizer, seed, rows)
        assert optimizer.memory[ROOM].peak_bytes <= 10 << 20
    assert moved(optimizer) > 0
    levels = [level.saved_bytes for level in optimizer._engine.trace.levels()]
    rounding = 8 * 1024  # slots of the step's eight storages are up to 1 KiB larger than these
    assert max(levels) <= offloader_of(optimizer).room_bytes + rounding
    optimizer.close()


def test_what_a_kept_graph_holds_is_not_forgotten(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, update="step")
    step(model, optimizer, 0, 16)
    saved_offloader = offloader_of(optimizer)
    assert saved_offloader.resting.rest is not None
    loss = model(normal(1, 16, WIDTH)).square().mean()
    loss.backward(retain_graph=True)
    aside = saved_offloader.resting.aside_bytes
    assert saved_offloader.resting.rest is None and aside > 0, "its room stays set aside"
    loss.backward()
    del loss
    gc.collect()
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 2, 16)
    assert saved_offloader.resting.rest is not None
    optimizer.close()


def test_what_was_changed_in_place_raises_as_ever(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    step(model, optimizer, 0, 16)
    assert offloader_of(optimizer).resting.rest is not None
    inner = []
    handle = model[1].up.register_forward_hook(lambda m, a, out: inner.append(out))
    loss = model(normal(1, 16, WIDTH)).square().mean()
    tanh = torch.tanh(inner[0])
    handle.remove()
    loss = loss + tanh.sum()
    tanh.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()


def test_memory_tells_of_it_and_ends_with_the_graph(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    levels = []
    for seed in range(4):
        step(model, optimizer, seed, 16)
        levels.append(max(level.saved_bytes for level in optimizer._engine.trace.levels()))
    assert offloader_of(optimizer).resting.rest is not None and levels[0] > 0
    last = optimizer._engine.trace.steps[-1]
    late = [x.saved_bytes for x in optimizer._engine.trace.levels() if x.at_ns > last.started_ns]
    assert max(late) == levels[0]
    loss = model(normal(9, 16, WIDTH)).square().mean()
    rest = weakref.ref(offloader_of(optimizer).resting.rest)
    del loss
    gc.collect()
    step(model, optimizer, 10, 16)
    assert rest() is None, "nobody holds it any more"
    optimizer.close()


@pytest.mark.parametrize("policy", ["host", "nvme", "recompute"])
def test_what_was_asked_to_leave_never_rests(tmp_path: Path, policy: str) -> None:
    model, optimizer = wrapped(tmp_path, activations=policy)
    for seed in range(3):
        step(model, optimizer, seed, 16)
        assert offloader_of(optimizer).resting.rest is None
    optimizer.close()


def test_memory_tells_what_a_larger_batch_takes_in_a_rest(tmp_path: Path) -> None:
    """As much as one that is looked at, though the last of these was smaller."""

    def most(folder: Path, *rows: int) -> int:
        model, optimizer = wrapped(folder)
        for seed, each in enumerate(rows):
            step(model, optimizer, seed, each)
        assert offloader_of(optimizer).resting.rest is not None, "the next one is"
        levels = max(level.saved_bytes for level in optimizer._engine.trace.levels())
        optimizer.close()
        return int(levels)

    alone = most(tmp_path / "a", 72)
    assert most(tmp_path / "b", 60, 72) == pytest.approx(alone, rel=0.05)
    assert most(tmp_path / "c", 60) < 0.9 * alone
