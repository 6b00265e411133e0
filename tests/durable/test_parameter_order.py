"""Optimizers that list parameters in an order of their own: no moments are swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, normal


def model_of_equals() -> nn.Module:
    """Four weights of one shape: a swap of moments fits, and only values can tell."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))


def adamw(model: nn.Module, *, turned: bool) -> torch.optim.AdamW:
    params = list(model.parameters())
    return torch.optim.AdamW(params[::-1] if turned else params, lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for seed in range(steps):
        x = normal(seed, 4, 8)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def exported(folder: Path, *, turned: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state of a run in an export, and every parameter's first moment by name."""
    (folder / "store").mkdir()
    model = model_of_equals()
    names = {id(p): name for name, p in model.named_parameters()}
    given = adamw(model, turned=turned)
    listed = [names[id(p)] for p in given.param_groups[0]["params"]]
    with overspill.wrap(
        model, given, device=CPU, nvme=folder / "store", host_memory="64MiB"
    ) as optimizer:
        train(model, optimizer, 2)
        optimizer.save(folder / "out")
        state = optimizer.state_dict()["state"]
    moments = {name: state[number]["exp_avg"].clone() for number, name in enumerate(listed)}
    tree: dict[str, Any] = torch.load(folder / "out" / "optimizer.pt", weights_only=True)
    return tree, moments


def test_the_file_has_the_order_of_the_optimizer(tmp_path: Path) -> None:
    """torch matches by place: in the same (reversed) order every moment finds its parameter."""
    tree, moments = exported(tmp_path, turned=True)
    assert tree["param_groups"][0]["param_names"] == [f"{i}.weight" for i in (3, 2, 1, 0)]
    model = model_of_equals()
    theirs = adamw(model, turned=True)
    theirs.load_state_dict(tree)
    for name, p in model.named_parameters():
        assert torch.equal(theirs.state[p]["exp_avg"].cpu(), moments[name])


@pytest.mark.parametrize("turned", [False, True])
def test_names_are_matched_in_any_order(tmp_path: Path, turned: bool) -> None:
    """``load_state_dict`` here goes by the names, so another order swaps nothing."""
    tree, moments = exported(tmp_path, turned=True)
    model = model_of_equals()
    given = adamw(model, turned=turned)
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [names[id(p)] for p in given.param_groups[0]["params"]]
    with overspill.wrap(model, given, device=CPU) as optimizer:
        optimizer.load_state_dict(tree)
        state = optimizer.state_dict()["state"]
    for number, name in enumerate(listed):
        assert torch.equal(state[number]["exp_avg"], moments[name])


def test_other_names_are_an_error(tmp_path: Path) -> None:
    tree, _ = exported(tmp_path, turned=False)
    tree["param_groups"][0]["param_names"][1] = "elsewhere.weight"
    model = model_of_equals()
    with (
        overspill.wrap(model, adamw(model, turned=False), device=CPU) as optimizer,
        pytest.raises(ValueError, match=r"lack '1\.weight'"),
    ):
        optimizer.load_state_dict(tree)


def test_resume_keeps_the_order(tmp_path: Path) -> None:
    """The optimizer that ``resume`` builds lists parameters as the one before did."""
    exported(tmp_path, turned=True)
    model = model_of_equals()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer, _ = overspill.resume(model, tmp_path / "store", device=CPU, host_memory="64MiB")
    with optimizer:
        listed = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
    assert listed == [f"{i}.weight" for i in (3, 2, 1, 0)]
