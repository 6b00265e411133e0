"""Remedies of what is said about weights, optimizer state, copies and averages."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import overspill
from tests.devices import CPU, normal, plainly
from tests.remedies.table import (
    WIDTH,
    adamw,
    logged,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip

LOCAL = {"host_memory": "64MiB"}


def twin(model: nn.Module) -> tuple[nn.Module, Any]:
    """A plain copy, and an optimizer over what is trained there."""
    params = [p for p in model.parameters() if p.requires_grad]
    master = "split" if params[0].dtype == torch.bfloat16 else None
    return model, plainly(overspill.optim.AdamW, params, lr=0.01, master=master)


# -- what is trained changes ------------------------------------------------------------------


AGAIN = "keep state = optimizer.state_dict(), call overspill.unwrap(model), change what is trained"


def everything(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@tries("offload/step/param_group_check.py", AGAIN,
       "has a gradient now, which would not be applied",
       "put the old lists back, or")  # fmt: skip
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["thawed", "groups", "gradient"])
def test_unwrap_change_wrap_load(
    case: str, dtype: torch.dtype, durable: bool, tmp_path: Path
) -> None:
    """As in plain PyTorch, where training goes on with one more parameter."""
    model, plain = net().to(dtype), net().to(dtype)
    for each in (model, plain):
        each[0].requires_grad_(False)
    make = adamw if case == "groups" else everything
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    optimizer = wrapped(model, make(model), **({"nvme": first} if durable else {}))
    _, reference = twin(plain)
    for number in range(2):
        step(model, optimizer, number)
        step(plain, reference, number)
    if case == "gradient":
        model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
        with says("which would not be applied; set p.grad = None, or keep state"):
            step(model, optimizer)
        model[0][0].weight.grad = None
        step(model, optimizer, 2)
        step(plain, reference, 2)
        optimizer.close()
        return
    for each in (model, plain):
        each[0].requires_grad_(True)
    new = list(model[0].parameters())
    if case == "groups":
        optimizer.param_groups[0]["params"].extend(new)
    with says(AGAIN):
        step(model, optimizer, 2)
    if case == "groups":
        del optimizer.param_groups[0]["params"][-len(new) :]
        model[0].requires_grad_(False)
        optimizer.step()
        model[0].requires_grad_(True)
    state = optimizer.state_dict()
    overspill.unwrap(model)
    optimizer = wrapped(model, make(model), **({"nvme": second} if durable else {}))
    optimizer.load_state_dict(state)
    reference.add_param_group({"params": list(plain[0].parameters())})
    for number in range(2, 4):
        step(model, optimizer, number)
        step(plain, reference, number)
    same(model, plain)
    optimizer.close()


@tries("offload/step/param_group_check.py", "put the old one back, or {}")
@pytest.mark.parametrize("way", ["put back", "again"])
def test_a_parameter_that_was_replaced(way: str) -> None:
    model = net()
    optimizer = wrapped(model)
    step(model, optimizer)
    old = model[1][0].weight
    model[1][0].weight = nn.Parameter(torch.eye(WIDTH))
    with says("put the old one back, or keep state = optimizer.state_dict()"):
        step(model, optimizer, 1)
    if way == "put back":
        model[1][0].weight = old
        optimizer.zero_grad()
        step(model, optimizer, 1)
        same(overspill.unwrap(model), plain_run(2))
        return
    model[1][0].weight = old
    state = optimizer.state_dict()
    overspill.unwrap(model)
    model[1][0].weight = nn.Parameter(torch.eye(WIDTH))
    with wrapped(model, everything(model)) as optimizer:
        optimizer.load_state_dict(state)
        trains(model, optimizer)


@pytest.mark.parametrize("change", ["prune", "parametrize", "both", "undo"])
def test_a_parameter_that_is_renamed_keeps_its_state(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Pruning and parametrizing rename parameters; between unwrap and wrap the state is kept."""

    def renames(model: nn.Module) -> None:
        if change in ("prune", "both"):
            prune.l1_unstructured(model[0][0], "weight", 0.3)  # type: ignore[index]
        if change in ("parametrize", "both"):
            parametrize.register_parametrization(model[1][0], "weight", nn.Identity())  # type: ignore[index]
        if change == "undo":
            prune.remove(model[2][0], "weight")  # type: ignore[index]

    def made() -> nn.Sequential:
        model = net()
        if change == "undo":
            prune.random_unstructured(model[2][0], "weight", 0.0)
        return model

    plain, model = made(), made()
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    optimizer = wrapped(model)
    for number in range(2):
        step(plain, its, number)
        step(model, optimizer, number)
    renames(plain)
    state = optimizer.state_dict()
    overspill.unwrap(model)
    renames(model)
    with wrapped(model, everything(model)) as optimizer:
        optimizer.load_state_dict(state)
        assert "is used for parameters that were renamed" in caplog.text
        for number in range(2, 4):
            step(plain, its, number)
            step(model, optimizer, number)
        same(model, plain)


@pytest.mark.parametrize("case", ["another shape", "two of one name"])
def test_state_is_not_that_of_another_parameter_by_its_name(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:

    class Parts(nn.Module):
        def __init__(self, **sizes: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            for name, size in sizes.items():
                self.register_parameter(name, nn.Parameter(torch.randn(size)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([p.square().sum() for p in self.parameters()]).sum() * x.sum()

    first, then = Parts(shared=4, weight=4), Parts(shared=4, weight_orig=6)
    if case == "two of one name":
        first, then = Parts(shared=4, weight=4, weight_orig=4), Parts(shared=4, weight=4)
        parametrize.register_parametrization(then, "weight", nn.Identity())
    optimizer = wrapped(first)
    first(torch.ones(1)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    overspill.unwrap(first)
    with wrapped(then, everything(then)) as optimizer:
        with says("delete them"):
            optimizer.load_state_dict(state)
        for number in range(1, len(state["state"])):
            del state["state"][number]
        optimizer.load_state_dict(state)
        assert len(optimizer.state[then.shared]) == 3
        assert not optimizer.state[list(then.parameters())[-1]]
        assert "renamed" not in caplog.text


@tries("offload/state/state_matching.py", "delete them (del state_dict['state'][{}] for {})",
       "build the optimizer with the same groups, or remove param_names")  # fmt: skip
def test_state_of_other_parameters() -> None:
    model = net()
    optimizer = wrapped(model)
    step(model, optimizer)
    state = optimizer.state_dict()
    overspill.unwrap(model)
    model[0].requires_grad_(False)
    with wrapped(model) as optimizer:
        with says("delete them (del state_dict['state'][1] for '0.0.bias') to load the rest"):
            optimizer.load_state_dict(state)
        for number in (0, 1):
            del state["state"][number]
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()["state"]
        for number, values in loaded.items():
            for name, value in values.items():
                assert torch.equal(value, state["state"][number + 2][name])
        trains(model, optimizer)
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        named = optimizer.state_dict()
        del named["param_names"]
        count = len(named["param_groups"][0]["params"])
        named["param_groups"][0]["param_names"] = [f"other.{n}" for n in range(count)]
        with says("build the optimizer with the same groups, or remove param_names to match"):
            optimizer.load_state_dict(named)
        del named["param_groups"][0]["param_names"]
        optimizer.load_state_dict(named)
        trains(model, optimizer)


@tries("offload/optimizer.py", "call it before wrap, or keep state = optimizer.state_dict()")
@pytest.mark.parametrize("way", ["before", "again"])
def test_add_param_group(way: str) -> None:
    model = net()
    head, rest = list(model[-1].parameters()), list(model[:-1].parameters())
    inner = torch.optim.AdamW(rest, lr=0.01)
    if way == "before":
        inner.add_param_group({"params": head, "lr": 0.02})
        with wrapped(model, inner) as optimizer:
            trains(model, optimizer)
        return
    optimizer = wrapped(model, inner)
    step(model, optimizer)
    with says("call it before wrap, or keep state = optimizer.state_dict()"):
        optimizer.add_param_group({"params": head, "lr": 0.02})
    state = optimizer.state_dict()
    overspill.unwrap(model)
    inner = torch.optim.AdamW(rest, lr=0.01)
    inner.add_param_group({"params": head, "lr": 0.02})
    with wrapped(model, inner) as optimizer:
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[1]["lr"] == 0.02
        found = optimizer.state_dict()["state"]
        assert all(
            torch.equal(found[number][name], value)
            for number, values in state["state"].items()
            for name, value in values.items()
        )
        trains(model, optimizer)


# -- the optimizer as an object -----------------------------------------------------------------


@tries("offload/optimizer.py", "assign an empty dict to optimizer.state to reset it, or use",
       "use optimizer.load_state_dict(other.state_dict())",
       "copy or save optimizer.state_dict()")  # fmt: skip
def test_what_the_engine_holds_of_an_optimizer() -> None:
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        state = optimizer.state_dict()
        words = "assign an empty dict to optimizer.state to reset it, or use load_state_dict"
        with says(words):
            optimizer.state = {model[0][0].weight: {"step": 1}}
        with says(words):
            optimizer.param_groups = []
        optimizer.param_groups[0]["lr"] = 0.02
        p = model[0][0].weight
        optimizer.state[p]["exp_avg"] = torch.ones_like(optimizer.state[p]["exp_avg"])
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], torch.ones(WIDTH, WIDTH))
        optimizer.state = {}
        assert not optimizer.state_dict()["state"]
        with says("use optimizer.load_state_dict(other.state_dict())"):
            optimizer.__setstate__({"state": {}})
        optimizer.load_state_dict(state)
        for act in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
            with says("copy or save optimizer.state_dict()"):
                act()
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        optimizer.load_state_dict(torch.load(saved, weights_only=True))
        found = copy.deepcopy(optimizer.state_dict())["state"]
        assert torch.equal(found[0]["exp_avg"], state["state"][0]["exp_avg"])
        trains(model, optimizer)


@tries("offload/state/lazy_state.py", "set it (state[p][name] = ...), or reset the parameter")
def test_a_single_value_of_state_that_is_removed() -> None:
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        p = model[0][0].weight
        with says("set it (state[p][name] = ...), or reset the parameter (state[p].clear())"):
            del optimizer.state[p]["exp_avg"]
        optimizer.state[p]["exp_avg"] = torch.zeros(WIDTH, WIDTH)
        assert not optimizer.state[p]["exp_avg"].any() and optimizer.state[p]["exp_avg_sq"].any()
        optimizer.state[p].clear()
        assert 0 not in optimizer.state_dict()["state"]
        trains(model, optimizer)


@tries("offload/state/torch_state.py", "take optimizer.state[p] or optimizer.state_dict() again")
@tries("offload/state/param_access.py", "take model.state_dict() again after a step")
def test_copies_that_are_changed_too_late() -> None:
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        state, weights = optimizer.state_dict(), model.state_dict()
        step(model, optimizer, 1)
        state["state"][0]["exp_avg"].zero_()
        with says("take optimizer.state[p] or optimizer.state_dict() again after a step"):
            optimizer.state_dict()
        optimizer.state_dict()["state"][0]["exp_avg"].zero_()
        assert not optimizer.state[model[0][0].weight]["exp_avg"].any()
        weights["0.0.weight"].zero_()
        with says("take model.state_dict() again after a step"):
            model.state_dict()
        model.state_dict()["0.0.weight"].zero_()
        assert not model.state_dict()["0.0.weight"].any()
        with torch.no_grad():
            model[1][0].weight.zero_()
        assert not model.state_dict()["1.0.weight"].any()
        trains(model, optimizer)


# -- the model ----------------------------------------------------------------------------------


@tries("offload/model_marks.py", "Copy it before wrap, or inside", "Save model.state_dict(), or")
def test_copies_and_pickles_of_a_wrapped_model(tmp_path: Path) -> None:
    before = copy.deepcopy(net())
    same(before, net())
    model = net()
    with wrapped(model, overspill.ema(adamw(model), 0.9), nvme=tmp_path) as optimizer:
        step(model, optimizer)
        with says("Copy it before wrap, or inside `with overspill.materialized(model):`"):
            copy.deepcopy(model)
        with says("Save model.state_dict(), or optimizer.save(path) (with a durable store)"):
            pickle.dumps(model)
        with overspill.materialized(model):
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                same(other, plain_run(1))
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        optimizer.save(tmp_path / "out")
        assert (tmp_path / "out" / "model.safetensors").exists()
        assert dict(optimizer.named_averages())
        trains(model, optimizer)


@tries("offload/state/materializing.py", "leave the `with` block before training")
@tries("offload/state/averages.py", "give the optimizer to overspill.ema(optimizer, decay)",
       "leave the `with optimizer.averaged()` block for all else")  # fmt: skip
def test_blocks_in_which_nothing_is_trained() -> None:
    model = net()
    optimizer = wrapped(model)
    with overspill.materialized(model), says("leave the `with` block before training"):
        optimizer.step()
    step(model, optimizer)
    with says("give the optimizer to overspill.ema(optimizer, decay) before wrap"):
        optimizer.averaged().__enter__()
    overspill.unwrap(model)
    with wrapped(model, overspill.ema(adamw(model), 0.9)) as optimizer:
        step(model, optimizer)
        with optimizer.averaged():
            with torch.no_grad():
                assert torch.isfinite(model(normal(0, 2, WIDTH))).all()
            with says("leave the `with optimizer.averaged()` block for all else"):
                optimizer.step()
        trains(model, optimizer)


@tries("offload/state/model_state.py", "call overspill.unwrap(model) before close()",
       "load without assign=True, or call overspill.unwrap(model) first")  # fmt: skip
@tries("offload/params/param_handle.py", "call overspill.unwrap(model) before close()")
@tries("offload/movement/health.py", "; build the model again{}")
def test_after_close() -> None:
    model = net()
    optimizer = wrapped(model)
    step(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with says("load without assign=True"):
        model.load_state_dict(weights, assign=True)
    model.load_state_dict(weights)
    optimizer.close()
    with says("overspill.unwrap(model) before close()"):
        model.state_dict()
    with says("; build the model again (overspill.unwrap(model) before close() keeps them)"):
        model(normal(0, 2, WIDTH))
    with says("; build the model again (overspill.unwrap(model) before close() keeps them)"):
        optimizer.state_dict()
    with says("overspill.unwrap(model) before close()"):
        model[0][0].weight.sum()
    model = net()
    optimizer = wrapped(model)
    step(model, optimizer)
    overspill.unwrap(model)
    optimizer.close()
    same(model, plain_run(1))


@tries("offload/params/operations.py", "take p.data, model.state_dict() or")
@tries("offload/params/parameters.py", "use copy_, or overspill.unwrap(model) first",
       "assign a tensor of these, pass precision= to wrap for another dtype")  # fmt: skip
def test_memory_of_a_parameter() -> None:
    model = net()
    optimizer = wrapped(model)
    p, value = model[0][0].weight, torch.full((WIDTH, WIDTH), 0.5)
    with says("use copy_, or overspill.unwrap(model) first"), torch.no_grad():
        p.set_(value)
    with torch.no_grad():
        p.copy_(value)
    assert torch.equal(model.state_dict()["0.0.weight"], value)
    with says("assign a tensor of these, pass precision= to wrap for another dtype"):
        p.data = value.double()
    p.data = value + 1
    assert torch.equal(model.state_dict()["0.0.weight"], value + 1)
    trains(model, optimizer)
    overspill.unwrap(model)
    p.data = value.bfloat16()
    with torch.no_grad():
        p.set_(value.bfloat16())
    model = net()
    with wrapped(model, precision="bf16") as optimizer:
        trains(model, optimizer)


@tries("offload/params/conversions.py", "To convert the model, call overspill.unwrap(model)")
def test_conversions(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = wrapped(model)
    step(model, optimizer)
    model.bfloat16()
    assert logged(caplog, "To convert the model, call overspill.unwrap(model) first")
    overspill.unwrap(model).bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with wrapped(model) as optimizer:
        trains(model, optimizer)


@tries("offload/state/param_access.py", "tie parameters before wrap, or assign a copy",
       "leave that option out and load the model before wrap, or")  # fmt: skip
def test_weights_that_cannot_be_changed_so() -> None:
    model = net()
    with wrapped(model) as optimizer:
        model[1][0].weight.data = model[0][0].weight.data
        with says("tie parameters before wrap, or assign a copy"):
            step(model, optimizer)
    model = net()
    model[1][0].weight = model[0][0].weight
    with wrapped(model) as optimizer:
        trains(model, optimizer)
    model = net()
    with wrapped(model) as optimizer:
        with torch.no_grad():
            model[1][0].weight.copy_(model[0][0].weight)
        weights = model.state_dict()
        assert torch.equal(weights["0.0.weight"], weights["1.0.weight"])
        trains(model, optimizer)


def test_packed_weights_are_not_changed() -> None:
    """Part of ``leave that option out and load the model before wrap``."""
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, 4))
    model[1].requires_grad_(False)
    new = torch.full((256, 256), 0.25)
    optimizer = wrapped(model, frozen="int8")
    words = "so it cannot be changed; leave that option out and load the model before wrap, or"
    with says(words), torch.no_grad():
        model[1].weight.copy_(new)
        model.state_dict()
    overspill.unwrap(model)
    with torch.no_grad():
        model[1].weight.copy_(new)
    optimizer = wrapped(model)
    assert torch.equal(model.state_dict()["1.weight"], new)
    optimizer.close()
    assert CPU
