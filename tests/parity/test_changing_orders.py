"""Layers that run in another order each step: the same bits, and few wasted bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.schedule.residency import Residency
from overspill.schedule.update_queue import DueUpdates
from tests.devices import CPU, SIM, normal
from tests.patience import in_the_end

WIDTH, LAYERS, STEPS = 64, 12, 24
KIB = 1 << 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.inner(x)))


class Ordered(nn.Module):
    """Runs its layers in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def orders(kind: str) -> Iterator[list[int]]:
    rng, layers = random.Random(0), list(range(LAYERS))
    for number in range(STEPS):
        tasks = layers[::-1] if number % 2 else layers
        yield rng.sample(layers, LAYERS) if kind == "random" else tasks


def rows(number: int) -> torch.Tensor:
    return normal(number, 2, WIDTH) / 8


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


class Moved:
    """Bytes moved by the steps from the eleventh on."""

    def __init__(self) -> None:
        self.read = self.copy_in = 0

    def add(self, made: Any, step: int) -> None:
        if step >= 10:
            self.read += made.stats.read.bytes
            self.copy_in += made.stats.copy_in.bytes


def train(model: nn.Module, optimizer: Any, kind: str, moved: Moved) -> list[float]:
    losses = []
    for number, order in enumerate(orders(kind)):
        loss = model(rows(number), order).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        moved.add(optimizer, number)
    return losses


PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": CPU, "host_memory": 1190 * KIB},
    "device": {"device": SIM, "device_memory": 740 * KIB, "host_memory": 810 * KIB},
    "ample": {"device": CPU, "host_memory": "1GiB"},
}


def trained(place: str, kind: str, folder: Path) -> tuple[Moved, list[float]]:
    model, moved = Ordered(), Moved()
    options = {"nvme": folder, "durable": False, "prefetch_depth": 2, "activations": "keep"}
    with overspill.wrap(model, sgd(model), **PLACES[place], **options) as optimizer:
        return moved, train(model, optimizer, kind, moved)


@pytest.mark.parametrize("kind", ["random", "two orders"])
@pytest.mark.parametrize("place", ["cpu", "device"])
def test_training_in_changing_orders(
    place: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly more is moved than in the same memory without any prefetch."""
    _, expected = trained("ample", kind, tmp_path)

    def measure() -> None:
        prefetching, losses = trained(place, kind, tmp_path)
        assert losses == expected
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "_prefetch", lambda self: None)
            patch.setattr(DueUpdates, "prefetch", lambda self: None)
            on_demand, losses = trained(place, kind, tmp_path)
        assert losses == expected
        assert on_demand.read > 0
        assert prefetching.read <= 1.1 * on_demand.read
        assert prefetching.copy_in <= 1.1 * on_demand.copy_in

    in_the_end(measure, tries=3)  # what runs at once comes in any order


@pytest.mark.parametrize("kind", ["random", "two orders"])
def test_inference_in_changing_orders(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Ordered().to(normal(0, 1).device)

    def run(*, prefetches: bool) -> int:
        model, moved = Ordered(), Moved()
        with torch.no_grad(), monkeypatch.context() as patch:
            if not prefetches:
                patch.setattr(Residency, "_prefetch", lambda self: None)
            options: Any = {"device": CPU, "host_memory": 660 * KIB, "prefetch_depth": 2}
            with overspill.wrap(model, nvme=tmp_path, **options) as made:
                for number, order in enumerate(orders(kind)):
                    output = model(rows(number), order)
                    assert torch.equal(output, plain(rows(number), order))
                    moved.add(made, number)
        return moved.read

    assert 0 < run(prefetches=True) <= 1.1 * run(prefetches=False)
