"""Modules that compute on several streams of the user's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import overspill
from tests.devices import normal, plainly


class Branches(nn.Module):
    """Two branches, each on a stream of its own, which start after what came before.

    ``joined``: the module waits for both; else its consumer does.
    """

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.streams = [torch.Stream("testdev"), torch.Stream("testdev")]
        self.joined = joined
        self.kept: list[torch.Tensor] = []  # whose memory would go to others too early

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        main, outs = torch.accelerator.current_stream(), []
        for branch, stream in zip((self.a, self.b), self.streams, strict=True):
            stream.wait_stream(main)
            with stream:
                product = branch(x)
                outs.append(torch.tanh(product))
                self.kept += [x, product, outs[-1]]
        if self.joined:
            self.join()
        return outs[0], outs[1]

    def join(self) -> None:
        for stream in self.streams:
            torch.accelerator.current_stream().wait_stream(stream)


class Net(nn.Module):
    def __init__(self, joined: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Branches(joined) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            a, b = block(x)
            if not block.joined:
                block.join()
            x = x + a + b
            block.kept.append(x)
        return x.square().mean()


@pytest.mark.parametrize("memory", ["160KiB", "64MiB"])
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_branches_on_streams_of_their_own(
    frozen: bool, joined: bool, update: str, memory: str, native: ModuleType, tmp_path: Path
) -> None:
    plain, model = Net(joined), Net(joined)
    for block in (*plain.blocks, *model.blocks):
        block.b.requires_grad_(not frozen)
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(
        model, ours, device="testdev", device_memory=memory, host_memory="64MiB", update=update,
    ) as optimizer:  # fmt: skip
        native.set_delays(1, 25, 2000)
        for number in range(3):
            for m, o in ((plain, theirs), (model, optimizer)):
                m(normal(number, 8, 64)).backward()
                o.step()
                o.zero_grad()
                torch.accelerator.synchronize()
                for block in m.blocks:
                    block.kept.clear()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
