"""Modules that compute on several streams of the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


def same_training(
    native: ModuleType, plain: Net, model: Net, step: Callable[[Net, Any, int], None],
    **options: Any,
) -> None:  # fmt: skip
    """Three steps of both with delays: the same bits, and (see conftest) no race."""
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"device": "testdev", "host_memory": "64MiB", "rates": overspill.Rates(), **options}
    with overspill.wrap(model, ours, **given) as optimizer:
        native.set_delays(3, 25, 2000)
        for number in range(3):
            for m, o in ((plain, theirs), (model, optimizer)):
                step(m, o, number)
                o.step()
                o.zero_grad()
                torch.accelerator.synchronize()
                for block in m.blocks:
                    block.kept.clear()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


def backward(model: Net, _: Any, number: int) -> None:
    model(normal(number, 8, 64)).backward()


def evaluated(model: Net, _: Any, number: int) -> None:
    with torch.no_grad():
        for _ in range(3):
            model(normal(number, 8, 64))
    backward(model, None, number)


def accumulated(model: Net, _: Any, number: int) -> None:
    for _ in range(2):
        backward(model, None, number)


@pytest.mark.parametrize("step", [backward, evaluated])
def test_a_unit_whose_parts_run_on_streams(
    step: Callable[[Net, Any, int], None], native: ModuleType
) -> None:
    """One unit, the parts of which nobody joins before it is let go; where autograd saves no weight
    (evaluation, first layers) nothing but their call tells of the stream."""
    names = [f"blocks.{n}" for n in range(6)]
    same_training(native, Net(False), Net(False), step, device_memory="100KiB", units=names)


def test_gradients_that_are_added_up_on_streams(native: ModuleType) -> None:
    same_training(native, Net(True), Net(True), accumulated, device_memory="64MiB")


class Twice(Net):
    """The same modules on two streams, each of which waits for what came before alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, outs = torch.accelerator.current_stream(), []
        streams = self.blocks[0].streams
        for stream in streams:
            stream.wait_stream(main)
            with stream:
                h = x
                for block in self.blocks:
                    product = block.a(h)
                    h = torch.tanh(product)
                    block.kept += [product, h, x]
                outs.append(h)
            x = x * 1.0
            self.blocks[0].kept.append(x)
        for stream in streams:
            main.wait_stream(stream)
        return (outs[0] + outs[1]).square().mean()


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_resident_weights_on_several_streams(update: str, native: ModuleType) -> None:
    """Each stream waits for the copy that brought them after the last update."""
    names = [f"blocks.{n}" for n in range(6)]
    native.set_rates(2e6, 2e6)
    same_training(
        native, Twice(True), Twice(True), backward, device_memory="250KiB", units=names,
        update=update,
    )  # fmt: skip


def test_a_span_between_streams_is_none_that_began_later(native: ModuleType) -> None:
    """Evaluation on a stream that is busy, then a forward on another: figures, and no error."""
    model, side = Net(True), torch.Stream("testdev")
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(
        model, ours, device="testdev", device_memory="64MiB", host_memory="64MiB", update="step",
        rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        native.set_delays(5, 25, 20_000)
        for number in range(3):
            backward(model, optimizer, number)
            optimizer.step()
            optimizer.zero_grad()
            side.wait_stream(torch.accelerator.current_stream())
            with side, torch.no_grad():
                model(normal(number, 8, 64))
        torch.accelerator.synchronize()
        trace = model.__dict__["_overspill_engine"].runtime.trace
        spans = [span for span in trace.spans() if span.lane == "compute"]
        assert spans and all(s.finished_ns >= s.started_ns for s in spans)
