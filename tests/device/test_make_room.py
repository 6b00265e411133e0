"""Allocations of the device that fail: the micro-batch is repeated, to the same bits."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import DEVICE, normal

WIDTH, TOKENS, STEPS = 64, 512, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"activations": "auto"},
    "host": {"activations": "host"},
    "selective": {"activations": "selective", "max_grad_norm": 1.0},
    "accumulated": {"activations": "host", "accumulate": 2},
}


def made() -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 16 * WIDTH, 0.0, batch_first=True)
              for _ in range(4))
        )  # fmt: skip


def allocations() -> int:
    return int(torch.accelerator.memory_stats()["allocation.all.peak"])


class Run:
    """Steps with an allocation of one micro-batch that fails, or with none."""

    def __init__(self, native: ModuleType, options: dict[str, Any]) -> None:
        self.native, self.options = native, options
        self.counts: list[int] = []  # allocations of each micro-batch
        self.failed = 0

    def train(self, at: tuple[int, int] | None = None) -> tuple[list[float], list[torch.Tensor]]:
        model, losses = made(), list[float]()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = {
            "device": DEVICE, "device_memory": "4MiB", "host_memory": "64MiB",
            "rates": overspill.Rates(), **self.options,
        }  # fmt: skip
        with overspill.wrap(model, adamw, **given) as optimizer:
            for number in range(STEPS * optimizer._engine.config.accumulate):
                losses.append(self._micro_step(model, optimizer, number, at))
                if (number + 1) % optimizer._engine.config.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            overspill.unwrap(model)
        return losses, [t.cpu() for t in model.state_dict().values()]

    def _micro_step(
        self, model: nn.Module, optimizer: Any, number: int, at: tuple[int, int] | None
    ) -> float:
        x = normal(number, 2, TOKENS, WIDTH)
        before = allocations()
        if at is not None and at[0] == number:
            self.native.fail_allocation(at[1])
        for _ in range(3):
            try:
                loss = model(x).square().mean()
                loss.backward()
                break
            except torch.OutOfMemoryError:
                loss = None  # type: ignore[assignment]
                self.failed += 1
                optimizer.make_room()
        self.native.fail_allocation(0)
        self.counts.append(allocations() - before)
        return float(loss)


@pytest.mark.parametrize("draws", [6, pytest.param(25, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_failed_allocation_costs_a_repetition(native: ModuleType, name: str, draws: int) -> None:
    whole = Run(native, OPTIONS[name])
    losses, weights = whole.train()
    rng, failed = random.Random(name), 0
    for _ in range(3 * draws):  # some have fewer allocations than were counted, and none fails
        number = rng.randrange(len(whole.counts))
        at = number, rng.randint(1, int(0.9 * whole.counts[number]))
        run = Run(native, OPTIONS[name])
        found = run.train(at)
        failed += run.failed
        assert found[0] == losses, at
        assert all(map(torch.equal, found[1], weights)), at
        if failed >= draws:
            break
    assert failed >= draws
    assert not native.take_races()
