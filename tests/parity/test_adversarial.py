"""A loss that passes through a model which ``update="backward"`` trains: gradients are applied as
they come, and whoever drops them hears of it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, normal, plainly

PLACES: dict[str, dict[str, Any]] = {
    "memory": {"device": CPU, "host_memory": "10MiB"},
    "disk": {"device": CPU, "host_memory": "60KiB"},
    "device": {"device": SIM, "device_memory": "60KiB", "host_memory": "10MiB"},
}


def _discriminator() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    return nn.Sequential(*layers).to(DEVICE)


def _generator() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(32, 32).to(DEVICE)


def _wrapped(model: nn.Module, place: str, folder: Path, update: Any = "backward") -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return overspill.wrap(model, inner, nvme=folder, update=update, **PLACES[place])


DROPS: dict[str, Callable[[nn.Sequential, Any], None]] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "None": lambda model, optimizer: setattr(model[0].weight, "grad", None),
    "del": lambda model, optimizer: delattr(model[2].weight, "grad"),
    "another": lambda model, optimizer: setattr(model[0].weight, "grad", normal(1, 32, 32)),
    "zero_": lambda model, optimizer: model[0].weight.grad.zero_(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drop", DROPS)
def test_dropping_gradients_that_were_applied_is_refused_at_once(
    drop: str, place: str, tmp_path: Path
) -> None:
    model = _discriminator()
    with _wrapped(model, place, tmp_path) as optimizer:
        model(normal(0, 4, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(_generator()(normal(1, 4, 32))).mean().backward()
        with pytest.raises(overspill.OffloadError, match="update='backward' has already applied"):
            DROPS[drop](model, optimizer)
        optimizer.step()  # the first thing that the message says
        DROPS[drop](model, optimizer)
        model.zero_grad()
        model(normal(2, 4, 32)).mean().backward()
        optimizer.step()


def _train(model: nn.Module, optimizer: Any, *, frozen: bool) -> tuple[nn.Module, list[float]]:
    """Both turns of an adversarial loop, three times."""
    generator, losses = _generator(), []
    its = torch.optim.SGD(generator.parameters(), lr=0.1)
    for number in range(3):
        made = generator(normal(number, 4, 32))
        loss = model(normal(10 + number, 4, 32)).mean() - model(made.detach()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(not frozen)
        model(made).mean().backward()
        its.step()
        its.zero_grad()
        optimizer.zero_grad()
        model.requires_grad_(True)
        losses.append(loss.item())
    return generator, losses


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("update", ["backward", "next_forward"])
def test_the_remedies_that_are_named_give_what_torch_gives(
    update: str, place: str, tmp_path: Path
) -> None:
    plain, model = _discriminator(), _discriminator()
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.1)
    frozen = update == "backward"
    expected, losses = _train(plain, its, frozen=frozen)
    with _wrapped(model, place, tmp_path, update) as optimizer:
        found, given = _train(model, optimizer, frozen=frozen)
        assert given == losses
        for name, value in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def test_a_rollback_undoes_an_update_that_was_not_meant(tmp_path: Path) -> None:
    model = _discriminator()
    with _wrapped(model, "disk", tmp_path) as optimizer:
        model(normal(0, 4, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.commit()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(_generator()(normal(1, 4, 32))).mean().backward()
        with pytest.raises(overspill.OffloadError, match=r"optimizer\.rollback\(\)"):
            model.zero_grad()
        optimizer.rollback()
        for name, value in before.items():
            assert torch.equal(model.state_dict()[name], value), name
        model.zero_grad()
