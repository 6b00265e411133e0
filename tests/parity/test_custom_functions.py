"""Functions written in Python: the saved weights that they are given are theirs, as in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM, about_cpu, normal, plainly

WIDTH = 32
PLACES: dict[str, dict[str, Any]] = {
    "memory": {"device": CPU},
    "disk": {"device": CPU, "host_memory": "64KiB"},
    "device": {"device": SIM, "device_memory": "24KiB", "host_memory": "4MiB"},
}
KEPT: list[torch.Tensor] = []


class HandsOut(torch.autograd.Function):
    """The gradient of a product's sum is the other factor, as it was saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x * w).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return w, x * grad


class Keeps(torch.autograd.Function):
    """As a multiplication, but what it unpacks stays somewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        KEPT.append(w)
        return grad @ w.t(), x.t() @ grad


class Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device="cpu") * 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(x, self.weight)


class Summed(nn.Module):
    """Its layers beside one another, so that each gives its input a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(HandsOut) for _ in range(12))

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([layer(x) for layer, x in zip(self.layers, xs, strict=True)]).sum()


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_a_saved_weight_that_becomes_a_gradient_is_nobodys_memory(
    place: str, update: Any, tmp_path: Path
) -> None:
    """What is done to the gradient is not done to the weight, nor the other way round."""
    ends: list[list[torch.Tensor]] = []
    for wrapped in (False, True):
        model = Summed()
        device = torch.device("cpu")
        if wrapped:
            optimizer: Any = overspill.wrap(
                model, torch.optim.SGD(model.parameters(), lr=0.1), nvme=tmp_path, update=update,
                rates=overspill.Rates(), **PLACES[place],
            )  # fmt: skip
            device = optimizer._engine.runtime.accelerator.device
        else:
            optimizer = overspill.optim.SGD(model.parameters(), lr=0.1)
        xs = [normal(n, WIDTH, WIDTH).to(device).requires_grad_() for n in range(12)]
        found: list[torch.Tensor] = []
        for number in range(3):
            model(xs).backward()
            for x in xs[::2]:
                assert x.grad is not None
                x.grad.zero_() if number else x.grad.add_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            found += [x.grad.to("cpu", copy=True) for x in xs if x.grad is not None]
        found += [value.to("cpu", copy=True) for value in model.state_dict().values()]
        ends.append(found)
        if wrapped:
            optimizer.close()
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("place", PLACES)
def test_a_saved_weight_that_is_kept_holds_no_room(place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(Keeps) for _ in range(8)))
    plain = nn.Sequential(*(Layer(Keeps) for _ in range(8)))
    plain.load_state_dict(model.state_dict())
    theirs = plainly(overspill.optim.SGD, plain.parameters(), lr=0.1)
    KEPT.clear()
    with overspill.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nvme=tmp_path,
        rates=overspill.Rates(), **PLACES[place],
    ) as optimizer:  # fmt: skip
        device = optimizer._engine.runtime.accelerator.device
        plain.to(device)
        for number in range(3):
            x = normal(number, 4, WIDTH).to(device)
            for m, o in ((plain, theirs), (model, optimizer)):
                m(x).square().sum().backward()
                o.step()
                o.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
    KEPT.clear()


@about_cpu
@pytest.mark.parametrize("change", ["in place", "data", "strides"])
@pytest.mark.parametrize("place", PLACES)
def test_a_cast_is_saved_as_it_was_changed(change: str, place: str, tmp_path: Path) -> None:
    """Under autocast a model may round its weights itself, as for training that knows of int8."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 1, 1) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if change == "strides":
                w = self.weight.view(8, 4, 8, 4).to(
                    torch.bfloat16, memory_format=torch.channels_last
                )
                return (x.view(8, 4, 8, 4) * w).reshape(WIDTH, WIDTH)
            w = self.weight.to(torch.bfloat16)
            with torch.no_grad():
                if change == "data":
                    w.data = torch.round(w.data * 8) / 8
                else:
                    w.mul_(8).round_().div_(8)
            return x * w[..., 0, 0]

    torch.manual_seed(0)
    model = nn.Sequential(*(Rounds() for _ in range(6)))
    plain = nn.Sequential(*(Rounds() for _ in range(6)))
    plain.load_state_dict(model.state_dict())
    theirs = overspill.optim.SGD(plain.parameters(), lr=0.1)
    with overspill.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nvme=tmp_path,
        rates=overspill.Rates(), **PLACES[place],
    ) as optimizer:  # fmt: skip
        for number in range(3):
            x = 1 + normal(number, WIDTH, WIDTH)
            losses = []
            for m, o in ((plain, theirs), (model, optimizer)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = m(x).float().sum()
                loss.backward()
                losses.append(loss.item())
                o.step()
                o.zero_grad()
            assert losses[0] == losses[1], number
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
