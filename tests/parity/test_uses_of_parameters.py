"""Uses of parameters outside of forward that go past tensors: storages, arrays, other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal, plainly
from tests.remedies.table import says

PLACES: dict[str, dict[str, Any]] = {
    "roomy": {"device": CPU, "host_memory": "4MiB"},
    "tight": {"device": CPU, "host_memory": "64KiB"},
    "device": {"device": SIM, "device_memory": "64KiB", "host_memory": "64KiB"},
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(DEVICE)


@pytest.fixture(params=PLACES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A wrapped model and a plain one, each with its optimizer, after one step."""
    model, plain = build(), build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = overspill.wrap(model, inner, nvme=tmp_path, durable=False, **PLACES[request.param])
    made = (model, optimizer), (plain, plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01))
    with optimizer:
        step(made, 0)
        yield made


def step(made: Any, number: int, between: Any = lambda model: None) -> None:
    for model, optimizer in made:
        model(normal(number, 4, 32)).square().mean().backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()


def same(made: Any) -> None:
    (model, _), (plain, _) = made
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["untyped", "typed", "copy"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_is_written_to_a_storage_is_written_to_the_weight(pair: Any, kind: str) -> None:
    for model, _ in pair:
        p = model[1].weight
        if kind == "untyped":
            p.untyped_storage().fill_(0)
        elif kind == "typed":
            p.storage()[5] = 3.0
        else:
            p.untyped_storage().copy_(torch.ones_like(p.detach()).untyped_storage())
    same(pair)
    step(pair, 1)
    same(pair)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_is_one_to_other_code_too(pair: Any) -> None:
    found = []
    for model, _ in pair:
        p = model[1].weight
        tensor = torch.empty(0, device=DEVICE).set_(p.untyped_storage())
        kept = torch.empty_like(p.detach())
        kept.untyped_storage().copy_(p.untyped_storage())
        typed = p.storage()
        found.append((tensor.view(32, 32).clone(), kept, typed[5], len(typed), typed.nbytes()))
        tensor.mul_(2)  # this is the weight
    for ours, plains in zip(*found, strict=True):
        assert ours == plains if not isinstance(ours, torch.Tensor) else torch.equal(ours, plains)
    same(pair)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_the_address_of_a_storage_is_refused_like_that_of_a_parameter(pair: Any) -> None:
    (model, _), _ = pair
    storage = model[1].weight.untyped_storage()
    assert storage.nbytes() == 32 * 32 * 4 and isinstance(storage, torch.UntypedStorage)
    assert len(storage) == storage.nbytes() and storage[0] == storage.tolist()[0]
    for asked in (storage, model[1].weight.storage(), model[1].weight.storage().untyped()):
        with says("has no address between its uses"):
            asked.data_ptr()
    assert model[1].weight.data.untyped_storage().data_ptr()


@about_cpu
@pytest.mark.parametrize("kind", ["numpy", "detach"])
def test_what_is_written_to_an_array_over_a_gradient_is_its_value(pair: Any, kind: str) -> None:
    def between(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            grad = p.grad if kind == "numpy" else p.grad.detach().cpu()
            grad.numpy()[:] = 0.01

    step(pair, 1, between)
    same(pair)


@pytest.mark.parametrize("kind", ["typed", "untyped", "set"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_is_written_to_the_storage_of_a_gradient_is_its_value(pair: Any, kind: str) -> None:
    def between(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            if kind == "typed":
                p.grad.storage()[3] = 9.0
            elif kind == "untyped":
                p.grad.untyped_storage()[3] = 66
            else:
                torch.empty(0, device=DEVICE).set_(p.grad.untyped_storage()).fill_(2)

    step(pair, 1, between)
    same(pair)


def test_a_gradient_has_no_address(pair: Any) -> None:
    (model, _), _ = pair
    model(normal(1, 4, 32)).sum().backward()
    grad = model[1].weight.grad
    assert grad is not None
    with says("p.grad has no address"):
        grad.data_ptr()
    assert grad.clone().data_ptr()
    grad.untyped_storage().fill_(0)
    assert not grad.any()


@pytest.mark.parametrize("kind", ["parameter", "model"])
def test_shared_memory_is_refused(pair: Any, kind: str) -> None:
    (model, _), _ = pair
    with says("cannot be shared with other processes"):
        model[1].weight.share_memory_() if kind == "parameter" else model.share_memory()
    copies = {name: value.share_memory_() for name, value in overspill.named_weights(model)}
    assert all(value.is_shared() for value in copies.values())
    step(pair, 1)
    same(pair)
    overspill.unwrap(model)
    assert model.share_memory()[1].weight.is_shared()


def test_a_parameter_of_a_parameter_is_refused(pair: Any) -> None:
    (model, _), (plain, _) = pair
    with says("nn.Parameter(p) of the wrapped parameter '1.weight' is not supported"):
        nn.Parameter(model[1].weight)
    for given in (model[1].weight.data, model[1].weight.detach()):
        assert torch.equal(nn.Parameter(given), plain[1].weight)


def test_vmap_over_what_is_computed_with_a_weight(pair: Any) -> None:
    found = []
    for model, _ in pair:
        p = model[1].weight
        found.append(torch.vmap(lambda v, p=p: p @ v)(normal(3, 5, 32)).detach())
    assert torch.allclose(*found)
