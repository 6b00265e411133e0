"""Masters of bf16 weights that their own modules change: split into the weight and a low half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import DEVICE, normal
from tests.parity.test_changes_in_forward import PLACES, Net, build, clamps


def test_the_master_of_a_bf16_weight_follows(tmp_path: Path) -> None:
    def made() -> Net:
        return build(clamps).bfloat16()

    found = []
    for place in PLACES:
        model = made()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        with overspill.wrap(model, inner, nvme=tmp_path, durable=False, **PLACES[place]) as opt:
            for number in range(4):
                model(normal(number, 4, 32).bfloat16()).square().mean().backward()
                opt.step()
                opt.zero_grad()
            # A step adds little more than lr to what was clamped.
            assert all(layer.inner.weight.abs().max() <= 0.065 for layer in model)
            found.append({n: v.clone() for n, v in model.state_dict().items()})
    for other in found[1:]:
        assert all(torch.equal(v, found[0][n]) for n, v in other.items())


class Scaling(nn.Linear):
    """Scales half of its weights in forward; the others keep the low halves of their masters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[::2].mul_(1.01)
        return super().forward(x)


@pytest.mark.parametrize("place", PLACES)
def test_split_masters_after_resume(place: str, tmp_path: Path) -> None:
    """As without the interruption: which elements a module has changed is known from the start."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Scaling(32, 32) for _ in range(5))).to(DEVICE, torch.bfloat16)

    def train(model: nn.Module, optimizer: Any, last: int) -> None:
        while optimizer.step_count < last:
            x = normal(optimizer.step_count, 16, 32).to(torch.bfloat16)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.003)

    found = []
    for number, cut in enumerate((8, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = build()
        with overspill.wrap(model, adamw(model), nvme=folder, **PLACES[place]) as optimizer:
            train(model, optimizer, cut)
            state = {name: value.cpu() for name, value in model.state_dict().items()}
        if cut < 8:
            model = build()
            optimizer, _ = overspill.resume(model, folder, adamw(model), **PLACES[place])
            with optimizer:
                train(model, optimizer, 8)
                state = {name: value.cpu() for name, value in model.state_dict().items()}
        found.append(state)
    whole, resumed = found
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def _master(optimizer: Any, index: int) -> torch.Tensor:
    master: torch.Tensor = optimizer.state_dict()["state"][index]["master"]
    return master


@pytest.mark.parametrize("place", PLACES)
def test_a_late_first_change_of_the_only_copy_is_said(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Warn if a module first changes a bf16 weight in a later forward, and no old copy exists."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).to(DEVICE, torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters(), lr=0.003)
    with overspill.wrap(model, inner, nvme=tmp_path, durable=False, **PLACES[place]) as optimizer:
        for number in range(5):
            if number == 3:
                before = _master(optimizer, 2)
                model[1].__class__ = Scaling
            model(normal(number, 16, 32).to(torch.bfloat16)).square().mean().backward()
            if number == 3:
                changed, weight = _master(optimizer, 2), model[1].weight.detach().float()
            optimizer.step()
            optimizer.zero_grad()
    said = [r.getMessage() for r in caplog.records if "1.weight" in r.getMessage()]
    assert torch.equal(changed[1::2], before[1::2])
    only_copy = place != "streamed" and DEVICE.type == "cpu"
    assert bool(said) == only_copy and torch.equal(changed[::2], weight[::2]) == (not only_copy)
    assert all("off by up to one bf16 rounding step" in text for text in said)
    assert len(said) <= 1
