"""Tensors that a unit hands through from another: backward does not go back to it for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from tests.devices import SIM, normal, plainly

WIDTH, DEPTH = 64, 6


class Block(nn.Module):
    """Its first one makes a bias that all others use, and hand on beside their own result."""

    def __init__(self, first: bool, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm = nn.Parameter(torch.ones(WIDTH, device="cpu"))
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Linear(WIDTH, WIDTH) if first else None

    def run(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            assert self.bias is not None
            bias = torch.tanh(self.bias(x))
        return x + self.two(torch.tanh(self.one(x * self.norm) + bias)), bias

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.recomputes:
            found: Any = checkpoint(self.run, x, bias, use_reentrant=False)
            return found[0], found[1] if bias is None else bias
        return self.run(x, bias)


class Stack(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(n == 0, recomputes) for n in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x.square().mean()


def least(model: nn.Module, options: dict[str, Any]) -> int:
    """The least device memory that a plan accepts."""
    low, high = 1, 64
    while low < high:
        middle = (low + high) // 2
        plan = overspill.plan(
            model, torch.optim.SGD(model.parameters(), lr=0.1),
            device_memory=f"{middle * 8}KiB", **options,
        )  # fmt: skip
        low, high = (low, middle) if plan.fits else (middle + 1, high)
    return low * 8


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_the_least_budget_is_enough(update: Any, recomputes: bool, tmp_path: Path) -> None:
    model, plain = Stack(recomputes), Stack(recomputes)
    options = {"device": SIM, "host_memory": "64MiB", "nvme": tmp_path, "update": update,
               "rates": overspill.Rates()}  # fmt: skip
    theirs = plainly(overspill.optim.SGD, plain.parameters(), lr=0.1)
    with overspill.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1),
        device_memory=f"{least(model, options)}KiB", **options,
    ) as ours:  # fmt: skip
        device = ours._engine.runtime.accelerator.device
        plain.to(device)
        for number in range(4):
            x = normal(number, 8, WIDTH).to(device)
            losses = []
            for m, o in ((plain, theirs), (model, ours)):
                loss = m(x)
                loss.backward()
                o.step()
                o.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        layout = ours.plan.detail.layout
        assert layout is not None
        moved = stays = 0
        for unit, home in zip(layout.units, layout.homes, strict=True):
            moved += 0 if home.resident else unit.weight_bytes
            stays += unit.weight_bytes if home.resident else 0  # what the CPU has updated comes
        copied = ours.stats.lanes["copy_in"].bytes
        assert 0 < moved < copied <= 2.5 * moved + stays


def test_t5_trains_under_checkpoints_in_what_its_plan_accepts(tmp_path: Path) -> None:
    """Its decoder hands a bias from layer to layer, and its weights are tied."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, vocab_size=512,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip

    def made() -> Any:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = transformers.T5ForConditionalGeneration(config)
        model.gradient_checkpointing_enable()
        return model.train()

    model, plain = made(), made()
    options = {"device": SIM, "host_memory": "64MiB", "nvme": tmp_path, "rates": overspill.Rates()}
    theirs = plainly(overspill.optim.SGD, plain.parameters(), lr=0.1)
    with overspill.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1),
        device_memory=f"{least(model, options)}KiB", **options,
    ) as ours:  # fmt: skip
        device = ours._engine.runtime.accelerator.device
        plain.to(device)
        for number in range(3):
            tokens = torch.randint(
                3, 500, (2, 16), generator=torch.Generator("cpu").manual_seed(number), device="cpu"
            ).to(device)
            losses = []
            for m, o in ((plain, theirs), (model, ours)):
                loss = m(input_ids=tokens, labels=tokens).loss
                loss.backward()
                o.step()
                o.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
