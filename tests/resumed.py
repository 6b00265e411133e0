"""A small job that is cut and resumed: the same data, dropout and schedule whatever the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill
from tests.devices import CPU, normal

WIDTH = 96


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def options(path: Path | Sequence[Path], **more: Any) -> dict[str, Any]:
    """Tight budgets: some of everything lives on disk, some in memory."""
    return {
        "nvme": path, "device": CPU, "host_memory": "700KiB", "rates": overspill.Rates(), **more
    }  # fmt: skip


def train(
    model: nn.Module, optimizer: Any, steps: int, schedule: Any = None, extra: Any = None
) -> None:
    """The data of a step come from its number, dropout from the global generator."""
    while optimizer.step_count < steps:
        torch.rand(3)  # what a loop draws for its batch
        batch = normal(optimizer.step_count, 6, WIDTH)
        model(batch.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    names = dict(model.named_parameters())
    biases = [p for n, p in names.items() if n.endswith("bias")]
    rest = [p for n, p in names.items() if not n.endswith("bias")]
    return torch.optim.AdamW([{"params": rest}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def whole_run(path: Path, steps: int = 6, **more: Any) -> tuple[dict[str, torch.Tensor], Any]:
    path.mkdir()
    model = build()
    with overspill.wrap(model, adamw(model), **options(path, **more)) as optimizer:
        torch.manual_seed(5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(model, optimizer, steps, schedule)
        return weights(model), optimizer.state_dict()


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right
