"""Tensors over weights that stay, which backward computes with: made once, and a limited number."""

from __future__ import annotations

import torch
from torch import nn

import overspill
from tests.devices import CPU, normal, plainly


class Part(nn.Module):
    """Every step uses another part of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        return x @ self.table[start : start + 8]


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        for part in self.parts:
            x = part(x, start)
        return x


def test_parts_without_number_are_not_all_kept() -> None:
    plain, ours = Sliced(), Sliced()
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-2)
    mine = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    optimizer = overspill.wrap(ours, mine, device=CPU, host_memory="64MiB")
    onloaded_units = optimizer._engine._onloaded_units
    for step in range(40):
        x = normal(step, 4, 8).requires_grad_()
        losses = []
        for model, by in ((plain, theirs), (ours, optimizer)):
            loss = model(x, step).square().mean()
            loss.backward()
            by.step()
            by.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses), step
    for onloaded in onloaded_units.current:
        assert onloaded is not None
        assert 0 < len(onloaded.lasting) <= 4 * len(onloaded.views)
    optimizer.close()
