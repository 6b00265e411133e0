"""Remedies of what is said while a model is trained: gradients, update modes, units, threads."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from tests.devices import CPU, SIM, about_cpu, about_sim, normal, plainly
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

EARLY = "offload/training/early.py"


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    return model(normal(number, 5, WIDTH)).square().mean()


def reference(micro: int = 1, steps: int = 2) -> nn.Module:
    """A plain run with so many backward passes a step."""
    model = net()
    optimizer = plainly(overspill.optim.AdamW, model.parameters(), lr=0.01)
    for number in range(steps):
        for each in range(micro):
            loss_of(model, number * micro + each).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# -- update="backward" ----------------------------------------------------------------------------


@tries(EARLY, "set accumulate=N or use overspill.accumulate(optimizer, final=...), or use",
       "call step() after it, also where that batch is to be left out",
       "pass accumulate=N, at least 2, to wrap")  # fmt: skip
@pytest.mark.parametrize("way", ["accumulate=", "accumulate()", "next_forward"])
def test_several_backward_passes_a_step(way: str) -> None:
    model = net()
    optimizer = wrapped(model, update="backward")
    loss_of(model).backward()
    for p in model.parameters():
        with contextlib.suppress(overspill.OffloadError):  # the first time
            p.grad = None
        p.grad = None
    with says("call step() after it, also where that batch is to be left out"):
        loss_of(model, 1).backward()
    optimizer.close()
    model = net()
    optimizer = wrapped(model, update="backward")
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    with says("pass accumulate=N, at least 2, to wrap"):
        optimizer.accumulate(final=False).__enter__()
    optimizer.close()
    model = net()
    with wrapped(model, update="backward") as optimizer:
        loss_of(model).backward()
        with says("set accumulate=N or use overspill.accumulate(optimizer, final=...), or use"):
            model[0][0].weight.grad.mul_(2)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        trains(model, optimizer)
    options: dict[str, Any] = {"update": "backward", "accumulate": 2}
    if way == "next_forward":
        options = {"update": "next_forward"}
    model = net()
    with wrapped(model, **options) as optimizer:
        for number in range(2):
            for each in range(2):
                final = each == 1
                if way == "accumulate()":
                    with overspill.accumulate(optimizer, final=final):
                        loss_of(model, 2 * number + each).backward()
                else:
                    loss_of(model, 2 * number + each).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = reference(2)
        for name, value in model.state_dict().items():
            assert torch.allclose(value, expected.state_dict()[name], atol=1e-6), name


@tries(EARLY, "Call step() before zero_grad()", "call step() before zero_grad(), or use update=")
@pytest.mark.parametrize("way", ["step first", "next_forward", "freeze", "rollback", "drop"])
def test_gradients_that_are_dropped(way: str, tmp_path: Path) -> None:
    model = net()
    update = "next_forward" if way == "next_forward" else "backward"
    with wrapped(model, update=update, nvme=tmp_path) as optimizer:
        step(model, optimizer)
        optimizer.commit()
        if way == "next_forward":
            loss_of(model, 9).backward()
            optimizer.zero_grad()
        elif way == "freeze":
            x = torch.ones(5, WIDTH, requires_grad=True)
            model.requires_grad_(False)
            model(x).sum().backward()
            assert x.grad is not None and x.grad.any()
            model.requires_grad_(True)
            optimizer.zero_grad()
        elif way != "step first":
            loss_of(model, 9).backward()
            with says("Call step() before zero_grad()."):
                optimizer.zero_grad()
            if way == "rollback":
                optimizer.rollback()
            else:
                optimizer.zero_grad()
                with says("call step() before zero_grad(), or use update='next_forward'"):
                    optimizer.step()
                optimizer.step()
                trains(model, optimizer)
                return
        step(model, optimizer, 1)
        same(model, plain_run(2))


@tries("offload/training/showing.py", "change them between step() and the next backward()",
       "or a hook reads them); use update='next_forward'")  # fmt: skip
@tries("offload/training/stepping.py", "change hyper-parameters between step() and the next")
@tries("offload/durable/commits.py", "commit between step() and the next backward()")
def test_changes_after_a_backward_that_updates(tmp_path: Path) -> None:
    model = net()
    with wrapped(model, update="backward", nvme=tmp_path) as optimizer:
        loss_of(model).backward()
        with says("change them between step() and the next backward()"), torch.no_grad():
            model[0][0].weight.mul_(2)
            model.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[0][0].weight.mul_(2)
        loss_of(model).backward()
        with says("commit between step() and the next backward()"):
            optimizer.commit()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.commit()
    model = net()
    with wrapped(model, update="backward") as optimizer:
        loss_of(model).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with says("change hyper-parameters between step() and the next backward()"):
            optimizer.step()
    model = net()
    with wrapped(model, update="backward") as optimizer:
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.02
        trains(model, optimizer)


# -- gradients -------------------------------------------------------------------------------------


@tries("offload/training/gradients.py", "zero_grad(), and run forward and backward again",
       "put a clone() of it there", "for a penalty on gradients use torch.autograd.grad(",
       "overspill keeps dense gradients only (for an embedding: sparse=False)")  # fmt: skip
@tries("offload/training/gradient_tensor.py", "keep p.grad.clone()")
def test_gradients_of_others() -> None:
    model = net()
    with wrapped(model) as optimizer:
        loss_of(model).backward()
        first, second = model[0][0].weight, model[1][0].weight
        first.grad = second.grad
        with says("put a clone() of it there"):
            optimizer.step()
        assert second.grad is not None
        first.grad = second.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        kept, copy = first.grad, first.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        with says("keep p.grad.clone()"):
            kept.sum()
        assert copy.abs().sum() > 0
        optimizer.step()
        optimizer.zero_grad()
        with says("for a penalty on gradients use torch.autograd.grad("):
            loss_of(model).backward(create_graph=True)
        optimizer.zero_grad()
        params = list(model.parameters())
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), net())
    ids = torch.arange(4)
    with wrapped(model) as optimizer, says("(for an embedding: sparse=False)"):
        model(ids).sum().backward()
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=False), net())
    with wrapped(model) as optimizer:
        model(ids).sum().backward()
        optimizer.step()


@tries("offload/training/held_gradients.py", "pass accumulate=N (micro-steps per step) to wrap")
def test_accumulation_in_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    for options, warns in (({}, True), ({"accumulate": 2}, False)):
        model = net().bfloat16()
        with wrapped(model, **options) as optimizer:  # type: ignore[arg-type]
            for number in range(2):
                x = normal(number, 5, WIDTH).bfloat16()
                model(x).square().mean().backward()
            optimizer.step()
        assert logged(caplog, "pass accumulate=N (micro-steps per step) to wrap") is warns


@tries("offload/training/landing.py", "lower the learning rate, clip with max_grad_norm, or look")
@tries("offload/training/stepping.py", "lower the learning rate, or look for the first loss")
@pytest.mark.parametrize("options", [
    {"update": "step"}, {"update": "step", "max_grad_norm": 1.0}, {"update": "next_forward"},
])  # fmt: skip
def test_values_that_are_not_finite(options: dict[str, Any], tmp_path: Path) -> None:
    model = net()
    optimizer = wrapped(model, nvme=tmp_path, **options)
    step(model, optimizer)
    optimizer.commit()
    with says("lower the learning rate"):
        (loss_of(model) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer)
    optimizer.close()
    model = net(seed=1)
    optimizer, _ = overspill.resume(model, tmp_path, adamw(model), device=CPU, **options)
    with optimizer:
        optimizer.param_groups[0]["lr"] = 0.001
        trains(model, optimizer, 1)


# -- weights in use --------------------------------------------------------------------------------


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


@tries("offload/training/edit_watch.py", "Read p again where you change it, instead of keeping")
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


@tries("offload/training/parameters.py", "replace it outside of forward, in the same shape")
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


@tries("offload/training/saved.py", "run backward before step()",
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
        late = loss_of(model, 1)
        late.backward()
        late = loss_of(model, 1)
    with says("run backward before close() or unwrap()"):
        late.backward()


@tries("offload/training/trainer.py", "do this in the thread that trains, and hand the result over")
@tries("offload/training/callers.py", "set a flag there, and look at it between steps")
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
@tries("offload/training/residences.py", "edit weights inside `with overspill.materialized(")
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


@tries("offload/training/recompute.py", "change it after backward, or pass activations='host'")
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


@tries("offload/training/roster.py", "supported on a wrapped model; call overspill.unwrap(model)")
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
@tries("offload/checks.py", "runs, which is not supported; name modules in target_modules")
def test_adapters_on_parameters() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(net(), peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["3.weight"]))  # fmt: skip
    with says("peft's target_parameters replaces parameters while the model runs"):
        wrapped(model)
    model = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["3"]))
    with wrapped(model) as optimizer:
        trains(model, optimizer)
