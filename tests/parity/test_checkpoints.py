"""Recomputation over one unit or several, with the least memory that a plan fits in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import overspill
from tests.devices import CPU, SIM, normal, plainly


class Block(nn.Module):
    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        if spare:  # never used: its unit's gradients are never all there
            self.spare = nn.Parameter(torch.zeros(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, segments: int, reentrant: bool, spare: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(spare) for _ in range(6)))
        self.segments, self.reentrant = segments, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint_sequential(
            self.blocks, self.segments, x.requires_grad_(), use_reentrant=self.reentrant
        )
        return out.square().mean()


def least(model: nn.Module, optimizer: Any, name: str, **options: Any) -> int:
    """The smallest budget of a tier that a plan fits in, within 1 KiB."""
    low, high = 0, 1 << 22
    while high - low > 1024:
        middle = (low + high) // 2
        fits = overspill.plan(model, optimizer, **options, **{name: middle}).fits
        low, high = (low, middle) if fits else (middle, high)
    return high


@pytest.mark.parametrize("device", sorted({CPU, SIM}))
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("segments", [6, 3, 2])
def test_the_least_memory_is_enough(
    segments: int, reentrant: bool, spare: bool, device: str, tmp_path: Any
) -> None:
    plain, model = (Net(segments, reentrant, spare) for _ in range(2))
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"device": device, "nvme": tmp_path, "rates": overspill.Rates()}
    if device == SIM:
        options["device_memory"] = least(
            model, ours, "device_memory", host_memory=1 << 22, **options
        )
    options["host_memory"] = least(model, ours, "host_memory", **options)
    with overspill.wrap(model, ours, **options) as optimizer:
        for number in range(2):
            for m, o in ((plain, theirs), (model, optimizer)):
                m(normal(number, 4, 48)).backward()
                o.step()
                o.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


class Detached(nn.Module):
    """The head trains the embedding; what is looked up in it is not trained, and recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.last = (
            nn.Embedding(50, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.reentrant = reentrant

    def look_up(self, tokens: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return self.first(functional.embedding(tokens, self.embed.weight.detach())) * one

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        one = torch.ones(1, device=tokens.device).requires_grad_()
        h = checkpoint(self.look_up, tokens, one, use_reentrant=self.reentrant)
        logits = functional.linear(self.last(torch.tanh(h)), self.embed.weight)
        return functional.cross_entropy(logits, tokens)


@pytest.mark.parametrize("device", sorted({CPU, SIM}))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
def test_a_checkpoint_over_weights_that_were_updated(
    update: str, reentrant: bool, device: str
) -> None:
    """Backward has updated the embedding when the checkpoint looks it up again: an error, and never
    the new weights."""
    plain, model = (Detached(reentrant) for _ in range(2))
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.05)
    ours = torch.optim.AdamW(model.parameters(), lr=0.05)
    options: dict[str, Any] = {"device": device, "update": update, "rates": overspill.Rates()}
    if device == SIM:
        options |= {"device_memory": "24KiB", "host_memory": "4MiB"}
    tokens = torch.arange(16)
    with overspill.wrap(model, ours, **options) as optimizer:
        if update == "backward":
            with pytest.raises(overspill.OffloadError, match="backward uses its weights again"):
                model(tokens).backward()
            return
        for _ in range(3):
            for m, o in ((plain, theirs), (model, optimizer)):
                m(tokens).backward()
                o.step()
                o.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
