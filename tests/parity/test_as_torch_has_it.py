"""What scripts do to optimizers and gradients has its meaning in torch, or raises."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, normal

OPTIONS: dict[str, Any] = {"device": CPU, "host_memory": "64MiB", "rates": overspill.Rates()}


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, 8)


def step(model: nn.Module, optimizer: Any) -> None:
    model(normal(3, 4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- state ----------------------------------------------------------------------------------------


@pytest.fixture
def default_bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_step_counts_are_exact_whatever_the_default_dtype(default_bf16: None) -> None:
    model = linear().float()
    with overspill.wrap(model, torch.optim.AdamW(model.parameters()), **OPTIONS) as optimizer:
        model(torch.ones(2, 8, dtype=torch.float32)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        state["state"][0]["step"] = torch.tensor(257.0, dtype=torch.float32)
        optimizer.load_state_dict(state)
        again = optimizer.state_dict()["state"][0]["step"]
    assert again.dtype is torch.float32 and again.item() == 257
    p = nn.Parameter(torch.ones(8, dtype=torch.float32, device="cpu"))
    ours = overspill.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    ours.step()
    kept = ours.state_dict()
    kept["state"][0]["step"] = torch.tensor(257.0, dtype=torch.float32)
    ours.load_state_dict(kept)
    ours.step()
    assert ours.state[p]["step"].item() == 258


def test_hooks_around_state_dicts_are_called() -> None:
    called: list[str] = []
    model = linear()
    inner = torch.optim.AdamW(model.parameters())
    inner.register_state_dict_pre_hook(lambda o: called.append("before"))
    with overspill.wrap(model, inner, **OPTIONS) as optimizer:
        step(model, optimizer)
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1})
        optimizer.register_load_state_dict_post_hook(lambda o: called.append("loaded"))

        def loads(_: Any, state: dict[str, Any]) -> None:
            called.append("loads")
            state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]
            del state["mine"]

        optimizer.register_load_state_dict_pre_hook(loads)
        state = optimizer.state_dict()
        assert state["mine"] == 1 and called == ["before"]
        optimizer.load_state_dict(state)
        assert called == ["before", "loads", "loaded"] and state["mine"] == 1
        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_optimizers_of_ours_may_be_copied(copied: Any) -> None:
    model = linear().to("cpu", torch.bfloat16)
    made = overspill.optim.AdamW(model.parameters(), moments="int8")
    twin, optimizer = copied((model, made))
    assert optimizer.moments == "int8"
    for each, by in ((model, made), (twin, optimizer)):
        for p in each.parameters():
            p.grad = torch.ones_like(p)
        by.step()
    assert torch.equal(model.weight, twin.weight)


def test_a_state_dict_of_what_is_around_the_model_is_not_kept() -> None:
    model = nn.Sequential(linear(), linear(1))
    with overspill.wrap(model, torch.optim.AdamW(model.parameters()), **OPTIONS) as optimizer:
        step(model, optimizer)
        around = nn.ModuleDict({"net": model})
        state = around.state_dict()
        held = [weakref.ref(value) for value in state.values()]
        del state
        gc.collect()
        assert not any(each() is not None for each in held)
        around.state_dict()["net.0.weight"].zero_()
        assert not around.state_dict()["net.0.weight"].any()


# -- gradients ------------------------------------------------------------------------------------


def of_two(wraps: bool) -> list[Any]:
    """What operations on gradients of two models give."""
    models, optimizers = [linear(0), linear(1)], []
    for number, model in enumerate(models):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            optimizer = overspill.wrap(model, optimizer, **OPTIONS)
        optimizers.append(optimizer)
        (model(normal(10 + number, 4, 8)).square().sum() * (1 + 9 * number)).backward()
    one, other = (model.weight for model in models)
    assert one.grad is not None and other.grad is not None
    found: list[Any] = [torch.equal(one.grad, other.grad), (one.grad + other.grad).norm()]
    parameters = [p for model in models for p in model.parameters()]
    found.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True))
    one.grad.add_(other.grad)
    found += [one.grad.norm(), other.grad.norm()]
    for model in models:
        assert model.bias.grad is not None
    models[0].bias.grad.copy_(models[1].bias.grad)
    found += [model.bias.grad.norm() for model in models]
    for optimizer in optimizers:
        optimizer.step()
    found += [model.state_dict()["weight"].norm() for model in models]
    if wraps:
        for optimizer in optimizers:
            optimizer.close()
    return found


def test_gradients_of_two_models_are_two_models() -> None:
    for found, expected in zip(of_two(True), of_two(False), strict=True):
        assert float(found) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.filterwarnings("ignore:Using backward")  # a cycle, which there is none of
def test_a_gradient_with_a_graph_is_refused() -> None:
    model = linear()
    with overspill.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS) as optimizer:
        step(model, optimizer)
        with pytest.raises(OffloadError, match="create_graph"):
            model(normal(0, 4, 8)).square().mean().backward(create_graph=True)
        optimizer.zero_grad()
        loss = model(normal(0, 4, 8)).square().mean()
        # One that was put there adds up with others, as in torch.
        (model.weight.grad,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
        step(model, optimizer)
