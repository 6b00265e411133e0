"""A model of blocks with attention, and a record of what is saved, for int8 activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from overspill.activations.offloader import SavedHandle, SavedTensorOffloader
from overspill.activations.precision import exact
from tests.devices import CPU, SIM, normal

WIDTH, TOKENS, CLASSES = 128, 512, 40
PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "24MiB", "host_memory": "64MiB"},
    "staged": {"device": SIM, "device_memory": "24MiB", "host_memory": "12MiB"},
    "cpu": {"device": CPU, "host_memory": "24MiB"},
}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(*x.shape[:-1], 4, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        made: torch.Tensor = x + self.mlp(self.norm(x))
        return made


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and classes that follow from them."""
    x = normal(step, 4, TOKENS // 4, WIDTH)
    return x.to(dtype), x[..., :CLASSES].argmax(-1).flatten()


def y(step: int) -> torch.Tensor:
    return data(step, torch.float32)[1]


@contextmanager
def recorded() -> Iterator[list[tuple[SavedHandle, bool]]]:
    """The handles of what is saved in the block, and whether a recomputation begins with it."""
    made, pack = list[tuple[SavedHandle, bool]](), SavedTensorOffloader.pack

    def recording(self: SavedTensorOffloader, t: torch.Tensor) -> SavedHandle | None:
        handle = pack(self, t)
        if handle is not None:
            made.append((handle, exact.depth > 0))
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensorOffloader, "pack", recording)
        yield made
