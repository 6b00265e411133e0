"""Units with frozen weights beside trained ones, as adapters have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.facts.tier import Tier
from tests.devices import CPU, SIM, normal, plainly

WIDTH, RANK, DEPTH = 64, 4, 8


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, behind a frozen one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.base = nn.Linear(width, width), nn.Linear(width, width)
        self.down, self.up = (
            nn.Linear(width, RANK, bias=False),
            nn.Linear(RANK, width, bias=False),
        )
        for p in (*self.first.parameters(), *self.base.parameters()):
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return torch.tanh(self.base(y) + self.up(self.down(y)))


def build(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(width) for _ in range(DEPTH)))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


RATES = overspill.Rates(h2d_bytes_s=1e9, d2h_bytes_s=1e9, update_params_s=1e9)
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


@pytest.mark.searches
@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
def test_adapters_are_updated_on_the_device(update: Any, tmp_path: Path) -> None:
    """If that is no slower; not with commits, which are written from host memory."""

    def run(**options: Any) -> tuple[overspill.Plan, list[float], dict[str, torch.Tensor]]:
        model = build(256)
        with overspill.wrap(
            model, torch.optim.AdamW(trained(model), lr=1e-2), device=SIM, update=update,
            rates=RATES, device_memory="2MiB", host_memory="64MiB", **options,
        ) as optimizer:  # fmt: skip
            losses = []
            for step in range(3):
                x = normal(step, 2, 256).to(next(model.parameters()).device)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return optimizer.plan, losses, {n: t.clone() for n, t in model.state_dict().items()}

    def live_there(plan: overspill.Plan) -> bool:
        layout = plan.detail.layout
        assert layout is not None and any(layout.streamed)
        homes = [layout.homes[unit.index] for unit in layout.units if unit.trainable]
        found = {home.grads is home.state[0] is Tier.DEVICE for home in homes}
        assert len(found) == 1
        return found.pop()

    plan, losses, values = run()
    assert live_there(plan)
    for committed in (False, True):
        there, again, kept = run(nvme=tmp_path, durable=committed)
        assert live_there(there) is not committed
        assert again == losses
        assert all(torch.equal(kept[name], value) for name, value in values.items())
