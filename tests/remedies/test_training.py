"""Remedies of what is said about weights, modules and threads while a model is trained."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from tests.devices import SIM, about_cpu, about_sim, normal, plainly
from tests.remedies.table import (
    WIDTH,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    return model(normal(number, 5, WIDTH)).square().mean()


class Changes(nn.Module):
    """Replaces its weights in forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.way)
        y: torch.Tensor = self.linear(x)
        return y

    @torch.no_grad()
    def change(self, way: str) -> None:
        if way == "data":
            self.linear.weight.data = self.linear.weight * 0.5


@tries("offload/params/edit_watch.py", "Read p again where you change it, instead of keeping")
def test_a_tensor_of_forward_that_changes_weights_later() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    kept: list[torch.Tensor] = []
    model, plain = net(), net()
    handle = model[0].register_forward_hook(lambda m, *_: kept.append(m.weight.detach()))
    expected = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    with wrapped(model) as optimizer:
        step(model, optimizer, 0)
        kept[0].zero_()
        with says("Read p again where you change it, instead of keeping that tensor"):
            step(model, optimizer, 1)
    handle.remove()
    model = net()
    with wrapped(model) as optimizer:
        for number in range(3):
            step(model, optimizer, number)
            step(plain, expected, number)
            for each in (model, plain):
                each[0].weight.detach().mul_(0.5)
        same(model, plain)


@tries("offload/params/parameters.py", "replace it outside of forward, in the same shape")
def test_weights_that_are_replaced_in_forward() -> None:
    def build(way: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Changes(way), Changes(way))

    way = "data"
    model = build(way)
    with wrapped(model) as optimizer, says("replace it outside of forward"):
        step(model, optimizer, 0)
    model, plain = build(""), build(way)
    expected = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    with wrapped(model) as optimizer:
        for number in range(3):
            for each in model:
                each.change(way)
            step(model, optimizer, number)
            step(plain, expected, number)
        same(model, plain)


@tries("offload/activations/saved_tensor_hooks.py", "run backward before step()",
       "run backward before close() or unwrap()")  # fmt: skip
def test_backward_that_comes_too_late() -> None:
    model = net()
    with wrapped(model) as optimizer:
        late = loss_of(model, 1)
        step(model, optimizer)
        with says("run backward before step()"):
            late.backward()
        optimizer.zero_grad()
        step(model, optimizer, 1)
        same(model, plain_run(2))
    model = net()
    with wrapped(model) as optimizer:
        late = loss_of(model, 1)
        late.backward()
        late = loss_of(model, 1)
    with says("run backward before close() or unwrap()"):
        late.backward()


@tries("offload/private/trainer.py", "do this in the thread that trains, and hand the result over")
@tries("offload/private/reentrancy.py", "set a flag there, and check it between steps")
def test_other_threads() -> None:
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        raised: list[BaseException] = []

        def other() -> None:
            try:
                model.state_dict()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "do this in the thread that trains, and hand the result over" in str(raised[0])
        weights = model.state_dict()
        sums: list[float] = []
        thread = threading.Thread(
            target=lambda: sums.extend(float(value.sum()) for value in weights.values())
        )
        thread.start()
        thread.join()
        assert len(sums) == len(weights)
        step(model, optimizer, 1)
        same(model, plain_run(2))


@about_sim
@tries(
    "offload/params/onloaded_units.py",
    "; assign it between steps, or inside `with overspill.materialized(",
)
def test_weights_that_are_replaced_unseen() -> None:
    model = net()
    with wrapped(model, device=SIM) as optimizer:
        with overspill.materialized(model, writeback=True), torch.no_grad():
            for p in model.parameters():
                p.data = torch.full_like(p, 0.5)
        assert all((value == 0.5).all() for value in model.state_dict().values())
        trains(model, optimizer)


class Scaled(nn.Module):
    """Has a number that a loop may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale)


@tries("offload/activations/recompute.py", "change it after backward, or pass activations='host'")
@pytest.mark.parametrize("way", ["after", "host"])
def test_a_module_that_changes_before_it_is_computed_again(way: str) -> None:
    def run(activations: str, late: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[Scaled() for _ in range(3)])
        with wrapped(model, activations=activations) as optimizer:
            for number in range(2):  # in which it is seen to compute the same twice
                step(model, optimizer, number)
            loss = loss_of(model)
            if not late:
                model[0].scale = 3.0
            loss.backward()
            model[0].scale = 3.0
            optimizer.step()

    with says("change it after backward, or pass activations='host'"):
        run("recompute", late=False)
    run("recompute" if way == "after" else "host", late=way == "after")


def test_a_checkpoint_reads_weights_that_are_updated() -> None:
    model = net()
    with wrapped(model, update="next_forward") as optimizer:
        y = checkpoint(model, normal(0, 5, WIDTH), use_reentrant=True)
        assert y is not None
        trains(model, optimizer)


@tries(
    "offload/step/param_group_check.py",
    "supported on a wrapped model; call overspill.unwrap(model)",
)
def test_functional_calls() -> None:
    model = net()
    fast = {name: p.detach().clone() * 2 for name, p in model.named_parameters()}
    x = normal(0, 5, WIDTH)
    expected = torch.func.functional_call(model, fast, (x,))
    optimizer = wrapped(model)
    with says("torch.func.functional_call replaces parameters while the model runs"):
        torch.func.functional_call(model, fast, (x,))
    overspill.unwrap(model)
    assert torch.equal(torch.func.functional_call(model, fast, (x,)), expected)
    optimizer.close()


@about_cpu
@tries("offload/checks.py", "which is trained itself; freeze it, or leave it out")
@pytest.mark.parametrize("remedy", ["freeze it", "leave it out"])
def test_adapters_on_parameters(remedy: str) -> None:
    peft = pytest.importorskip("peft")
    over = {"target_modules": [], "target_parameters": ["3.weight"]}
    model = peft.get_peft_model(net(), peft.LoraConfig(r=2, **over))
    weight = model.get_parameter("base_model.model.3.base_layer.weight").requires_grad_()
    with says("target_parameters adapts 'weight', which is trained itself; freeze it"):
        wrapped(model)
    weight.requires_grad_(False)
    if remedy == "leave it out":
        model = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["3"]))
    with wrapped(model) as optimizer:
        trains(model, optimizer)


class Past(nn.Module):
    """Computes with the weight of another unit, past the class of its parameter."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.own, self.way = nn.Linear(128, 128), nn.Linear(128, 128), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "call":
            return torch.tanh(self.own(self.inner(x)))
        weight = self.own.weight.data.clone() if self.way == "copy" else self.own.weight
        with torch._C.DisableTorchFunctionSubclass():
            return torch.tanh(self.inner(x).matmul(weight.t()))


@tries("offload/params/onloaded_units.py",
       "extension, say), so its result is NaN; call the module that holds the")  # fmt: skip
@pytest.mark.parametrize("way", ["call", "copy", "resident"])
def test_a_weight_that_is_read_past_its_class(way: str, tmp_path: Path) -> None:
    def losses(way: str, **options: Any) -> list[float]:
        torch.manual_seed(0)
        model = Past(way)
        options |= {"units": ["inner", "own"], "host_memory": "500KiB", "nvme": tmp_path}
        with wrapped(model, durable=False, **options) as optimizer:
            found = []
            for number in range(3):
                loss = model(normal(number, 5, 128)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    with says("so its result is NaN; call the module that holds the parameter"):
        losses("past")
    found = losses("past", resident=["own"]) if way == "resident" else losses(way)
    assert found[0] > 0 and all(map(math.isfinite, found))


def hooked(model: nn.Module) -> nn.Module:
    """Updates each weight in a hook of its own backward, as some loops do to save memory."""

    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return model


@tries("offload/state/param_access.py", "runs, as in a hook; change them between backward() and")
@pytest.mark.parametrize("way", ["between", "backward"])
def test_weights_that_hooks_of_their_own_backward_change(way: str, tmp_path: Path) -> None:
    def made(**options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(normal(0, 1).device)
        if not options:
            return hooked(model), None
        given = {"host_memory": "120KiB", "nvme": tmp_path, "durable": False, **options}
        return model, wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)

    def backward(model: nn.Module, number: int) -> None:
        model(normal(number, 5, 64)).square().mean().backward()

    model, optimizer = made(update="step")
    hooked(model)
    with optimizer, says("cannot be changed while its forward or backward runs, as in a hook"):
        backward(model, 0)
    plain, _ = made()
    model, optimizer = made(update="backward" if way == "backward" else "step")
    with optimizer:
        for number in range(3):
            backward(plain, number)
            backward(model, number)
            if way == "backward":
                optimizer.step()
            with torch.no_grad():
                for p in model.parameters() if way == "between" else ():
                    p.add_(p.grad, alpha=-0.1)
            optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            assert torch.allclose(model.state_dict()[name], value, atol=1e-6), name


@about_cpu
@tries(
    "offload/activations/recompute.py", "compute it again; pass activations='host', or recompute"
)
@pytest.mark.parametrize("way", ["host", "checkpoint"])
def test_a_unit_that_changes_its_input_is_not_computed_again(way: str, tmp_path: Path) -> None:
    """A router of transformers adds noise to its input in place."""
    hf = pytest.importorskip("transformers")
    config = hf.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_sparse_encoder_layers=1,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=4, num_experts=2,
        decoder_start_token_id=0, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip

    def losses(activations: str | None, *, checkpoint: bool = False) -> list[float]:
        torch.manual_seed(0)
        model = hf.SwitchTransformersForConditionalGeneration(config)
        if checkpoint:
            model.gradient_checkpointing_enable()
        optimizer: Any = plainly(overspill.optim.AdamW, model.parameters(), lr=0.01)
        if activations is not None:
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer = wrapped(model, inner, host_memory="64MiB", activations=activations)
        found = []
        try:
            for number in range(2):
                ids = torch.arange(number, number + 12).view(2, 6)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        finally:
            if activations is not None:
                optimizer.close()
        return found

    with says("changes its input in place when it runs, so that backward cannot compute it again"):
        losses("recompute")
    found = losses("host") if way == "host" else losses("keep", checkpoint=True)
    assert found == losses(None, checkpoint=way != "host")
