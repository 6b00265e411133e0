"""What is trained is what ``wrap`` saw: whoever changes that is told before anything is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM
from tests.models import TinyLM, adamw, batch, train, weights


def resize(model: Any, optimizer: Any) -> None:
    model.embed = nn.Embedding.from_pretrained(torch.randn(600, 64), freeze=False)


def replace(model: Any, optimizer: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(500, 64))


def take_out(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


def put_in(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.zeros(3)))


def move(model: Any, optimizer: Any) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    second.append(first.pop())


@pytest.mark.parametrize("change", [replace, take_out, put_in, move])
@pytest.mark.parametrize("then", ["forward", "step"])
def test_changes_of_what_is_trained_are_told(change: Callable[[Any, Any], None], then: str) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), device=SIM, device_memory="600KiB", host_memory="32MiB",
        rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 2)
        before = weights(model)
        if then == "step":
            model(*batch(0)).backward()
        change(model, optimizer)
        with pytest.raises(overspill.OffloadError, match=r"after it was wrapped|since wrap"):
            if then == "forward":
                model(*batch(0))
            else:
                optimizer.step()
        assert optimizer.step_count == 2
        known = {id(p) for p in model.parameters()}
        after = {name: p for name, p in model.named_parameters() if id(p) in known}
        for name in before.keys() & after.keys() - {"head.weight"}:
            assert torch.equal(after[name].detach(), before[name]), name


def test_other_modules_in_a_model_are_left_alone() -> None:
    """A module that is put in the place of one, or around it, uses its parameters or does not:
    what the engine holds is still what the old module has."""
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        model.blocks[1].up = nn.Sequential(model.blocks[1].up, nn.Identity())
        model.blocks[2].register_buffer("seen", torch.zeros(1))
        train(model, optimizer, 2)
        assert optimizer.step_count == 2
        resize(model, optimizer)  # its parameters are in no optimizer, as in plain PyTorch
        train(model, optimizer, 1)


def test_a_gradient_of_what_is_not_trained_is_not_dropped() -> None:
    model = TinyLM()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        model(*batch(0)).backward()
        frozen.grad = torch.ones_like(frozen)
        with pytest.raises(overspill.OffloadError, match="has a gradient now"):
            optimizer.step()
        frozen.grad = None
        optimizer.step()
