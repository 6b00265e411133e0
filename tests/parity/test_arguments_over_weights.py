"""Modules that are called with a view of a weight which is not theirs, and are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from tests.devices import CPU, DEVICE, SIM, normal, plainly

PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "4MiB"},
    "streamed": {"device": SIM, "device_memory": "80KiB", "host_memory": "160KiB"},
}


class Learned(nn.Module):
    """A cell with a learned initial state, or a norm of learned queries."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 32) * 0.1)
        self.inner = nn.GRUCell(16, 32) if kind == "gru" else nn.LayerNorm(32)
        self.kind, self.how = kind, how

    def compute(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        if self.kind == "gru":
            return self.inner(x, first)  # type: ignore[no-any-return]
        return self.inner(first) * x.repeat(1, 2)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first.expand(len(x), -1)
        if self.how == "plain":
            return x + self.compute(x, first)[:, :16]
        reentrant = self.how == "reentrant"
        found: torch.Tensor = checkpoint(self.compute, x, first, use_reentrant=reentrant)
        return x + found[:, :16]


def _train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for number in range(3):
        loss = model(normal(number, 3, 16).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activations", ["recompute", "auto"])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("kind", ["gru", "norm"])
def test_the_losses_are_those_of_torch(
    kind: str, how: str, activations: str, place: str, tmp_path: Path
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Learned(kind, how) for _ in range(4))).to(DEVICE)

    plain, model = build(), build()
    expected = _train(plain, plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {
        "activations": activations, "nvme": tmp_path, "durable": False,
        "units": [f"{n}.inner" for n in range(4)], "rates": overspill.Rates(), **PLACES[place],
    }  # fmt: skip
    with overspill.wrap(model, inner, **options) as optimizer:
        assert _train(model, optimizer) == expected
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
