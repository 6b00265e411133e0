"""Saved parts of one storage that count their versions apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.activations import offloader
from tests.devices import CPU, SIM, normal
from tests.models import weights

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": CPU, "host_memory": "8MiB"},
    "device": {"device": SIM, "device_memory": "1200KiB", "host_memory": "16MiB"},
}


class Gates(nn.Module):
    """As ``nn.LSTMCell`` on a CPU: parts of one storage that count their versions apart are made
    final one after the other, each just before it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(32, 128), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.unsafe_chunk(self.inner(x), 4, dim=1)
        y = gates[0].sigmoid_()
        for gate in gates[1:]:
            y = y * gate.sigmoid_()
        return self.head(y)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_parts_that_count_their_versions_apart(
    place: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved of the first part has left when the next one changes."""

    def look(saved_offloader: offloader.SavedTensorOffloader) -> None:
        saved_offloader.tell()
        saved_offloader._executor.engine_port.catch_up()
        for saved in [each() for each in list(saved_offloader._store._known.values())]:
            if saved is not None and saved.memory is not None:
                saved.memory = saved.memory.clone()  # as a copy that is brought back would be

    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)
    if told:
        monkeypatch.setattr(offloader.SavedTensorOffloader, "_look", look)
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = Gates()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        if wraps:
            optimizer = overspill.wrap(
                model, optimizer, nvme=tmp_path, durable=False, activations="auto", **PLACES[place]
            )
        device = next(model.parameters()).device
        model(normal(0, 64, 32).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: value.cpu().clone() for name, value in weights(model).items()})
        if wraps:
            optimizer.close()
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-6), name
