"""A chain of small blocks that tell how often they ran, for tests of what is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.activations import known_code, offloader
from overspill.planning import simulate
from tests.devices import SIM, normal

RATES = overspill.Rates(
    h2d_bytes_s=1e6, d2h_bytes_s=1e6, dram_bytes_s=20e9, update_params_s=1e9,
    device_flops_s=2e10, disk_read_bytes_s=1e9, disk_write_bytes_s=1e9,
)  # fmt: skip
TIGHT = {"device": SIM, "device_memory": "700KiB", "host_memory": "64MiB"}
PURE = known_code._pure
CALLS: list[int] = []  # of blocks, outside of them


def known_as_the_libraries_are(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What this module and the one of ``name`` define is known code, and small tensors leave."""
    for module in (offloader, simulate):
        monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    ours = (__name__, name)
    monkeypatch.setattr(known_code, "LIBRARIES", (*known_code.LIBRARIES, *ours))
    monkeypatch.setattr(known_code, "_pure", lambda module: module in ours or PURE(module))
    CALLS.clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return x + torch.tanh(self.out(torch.sigmoid(self.inner(x))))


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


class Checkpointed(Chain):
    """Checkpoints of the user's own around all blocks, once they are asked for."""

    asked = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.asked else block(x)
        return self.head(x).pow(2).mean()


def chain(count: int = 8) -> Chain:
    torch.manual_seed(0)
    return Chain([Block() for _ in range(count)])


def step(model: nn.Module, optimizer: Any, seed: int, batch: int = 16) -> float:
    loss = model(normal(seed, batch, 8, 32))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())
