"""Units with frozen weights beside trained ones, as adapters have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM, normal, plainly

WIDTH, RANK, DEPTH = 64, 4, 8


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, behind a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.up = (
            nn.Linear(WIDTH, RANK, bias=False),
            nn.Linear(RANK, WIDTH, bias=False),
        )
        for p in (*self.first.parameters(), *self.base.parameters()):
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return torch.tanh(self.base(y) + self.up(self.down(y)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(DEPTH)))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "120KiB", "host_memory": "64MiB"}
}
if CPU == "cpu":
    PLACES["disk"] = {"device": CPU, "host_memory": "250KiB"}


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_a_unit_is_fetched_once_in_forward_and_once_in_backward(
    place: str, update: Any, tmp_path: Path
) -> None:
    """Its frozen weights are of use after the last gradient of its trained ones."""
    model, plain = build(), build()
    theirs = plainly(overspill.optim.AdamW, trained(plain), lr=1e-2)
    with overspill.wrap(
        model, torch.optim.AdamW(trained(model), lr=1e-2), nvme=tmp_path, update=update,
        rates=overspill.Rates(), **PLACES[place],
    ) as ours:  # fmt: skip
        device = ours._engine.runtime.accelerator.device
        plain.to(device)
        for number in range(5):
            x = normal(number, 4, WIDTH).to(device)
            losses = []
            for m, o in ((plain, theirs), (model, ours)):
                loss = m(x).square().sum()
                loss.backward()
                o.step()
                o.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        layout = ours.plan.detail.layout
        assert layout is not None
        moved = [
            unit.weight_bytes
            for unit, home in zip(layout.units, layout.homes, strict=True)
            if not home.resident
        ]
        assert len(moved) >= 5
        if place == "device":  # a few that backward has updated may come once more
            assert sum(moved) < ours.stats.lanes["copy_in"].bytes <= 2.7 * sum(moved)
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
