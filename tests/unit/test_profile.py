"""One example step, watched unit by unit, and what a plan makes of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from benchmarks.model import Gpt, Shape, batch_of
from overspill.facts.rates import Rates

RATES = Rates(disk_read_bytes_s=1e9, disk_write_bytes_s=1e9, update_params_s=1e9)
FORWARD_S, BACKWARD_S = 0.02, 0.05


class Slow(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


class Block(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.up, self.slow = nn.Linear(16, 16), slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return Slow.apply(x) if self.slow else x


def model_of(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(Block(number == 2) for number in range(5)))


def plan_of(model: nn.Module, x: torch.Tensor, folder: Path, **more: Any) -> overspill.Plan:
    adamw = torch.optim.AdamW(model.parameters())
    return overspill.plan(
        model, adamw, device="cpu", nvme=folder, rates=RATES,
        example=lambda: model(x).sum(), **more,
    )  # fmt: skip


def test_each_unit_gets_its_own_seconds(tmp_path: Path) -> None:
    """Per-unit compute time from one profiled step; the plan's step takes at least that long."""
    model = model_of()
    plan = plan_of(model, torch.ones(4, 16), tmp_path)
    profile = plan.detail.profile
    assert profile is not None
    assert max(profile.forward_s, key=lambda name: profile.forward_s[name]) == "2"
    assert max(profile.backward_s, key=lambda name: profile.backward_s[name]) == "2"
    assert FORWARD_S <= profile.forward_s["2"] < 2 * FORWARD_S
    assert BACKWARD_S <= profile.backward_s["2"] < 2 * BACKWARD_S
    assert plan.step_s is not None and plan.bound_s is not None
    assert plan.step_s >= plan.bound_s * 0.999 >= FORWARD_S + BACKWARD_S
    assert plan.bottleneck == "compute"
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_were_there_stay(tmp_path: Path) -> None:
    model, x = model_of(), torch.ones(4, 16)
    model(x).sum().backward()
    before = [p.grad for p in model.parameters()]
    plan_of(model, x, tmp_path)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_activations_by_shapes_are_about_those_measured(tmp_path: Path) -> None:
    """Without an example, from the shapes of the weights alone."""
    shape = Shape(layers=6, width=128, heads=4, vocabulary=256, batch=2, tokens=64)
    model = Gpt(shape)
    measured = plan_of(model, batch_of(shape, 0), tmp_path).detail.activation_bytes
    adamw = torch.optim.AdamW(model.parameters())
    told = overspill.plan(model, adamw, device="cpu", rates=RATES, tokens=2 * 64)
    assert measured is not None and told.detail.activation_bytes is not None
    assert told.detail.activation_bytes == pytest.approx(measured, rel=0.2)
    assert overspill.plan(model, adamw, device="cpu", rates=RATES).detail.activation_bytes is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_activations_are_counted_once_and_without_weights(device: str, tmp_path: Path) -> None:
    """Activation bytes from one step, or from shapes alone on ``meta``."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    model = model.to(device)
    x = torch.ones(8, 16, device=device)
    profile = plan_of(model, x, tmp_path, units=["0", "1", "2"]).detail.profile
    assert profile is not None
    matrix = 8 * 16 * 4
    # The first keeps the input and its ReLU's result, which the next one keeps too.
    assert profile.activation_bytes == {"0": 2 * matrix, "1": matrix, "2": matrix}
    assert bool(profile.forward_s) == (device == "cpu")
