"""Remedies of what is said about gradients, and about updates in backward."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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

EARLY = "offload/grads/backward_update_policy.py"


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


@tries(EARLY, "set accumulate=N or use overspill.accumulate(optimizer, final=...); freeze a",
       "call step() after it, also to skip that batch",
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
    with says("call step() after it, also to skip that batch"):
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
        with says("set accumulate=N or use overspill.accumulate(optimizer, final=...); freeze a"):
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


@tries(
    EARLY,
    "; call step() before zero_grad(), or optimizer.rollback()",
    "; call step() before zero_grad(), or use update=",
)
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
            with says("call step() before zero_grad(), or optimizer.rollback()"):
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


@tries("offload/params/resident_param_guard.py",
       "change them between step() and the next backward()",
       "a hook reads it, use update='next_forward'")  # fmt: skip
@tries("offload/step/stepping.py", "change hyper-parameters between step() and the next")
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


@tries("offload/grads/gradients.py", "zero_grad(), and run forward and backward again",
       "assign a clone() of it", "for a penalty on gradients use torch.autograd.grad(",
       "overspill keeps dense gradients only (for an embedding: sparse=False)")  # fmt: skip
@tries("offload/grads/gradient_tensor.py", "keep p.grad.clone()")
def test_gradients_of_others() -> None:
    model = net()
    with wrapped(model) as optimizer:
        loss_of(model).backward()
        first, second = model[0][0].weight, model[1][0].weight
        first.grad = second.grad
        with says("assign a clone() of it"):
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


@tries("offload/grads/held_gradients.py", "pass accumulate=N (micro-steps per step) to wrap")
def test_accumulation_in_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    for options, warns in (({}, True), ({"accumulate": 2}, False)):
        model = net().bfloat16()
        with wrapped(model, **options) as optimizer:  # type: ignore[arg-type]
            for number in range(2):
                x = normal(number, 5, WIDTH).bfloat16()
                model(x).square().mean().backward()
            optimizer.step()
        assert logged(caplog, "pass accumulate=N (micro-steps per step) to wrap") is warns


@tries(
    "offload/grads/update_waiter.py", "lower the learning rate, clip with max_grad_norm, or look"
)
@tries("offload/step/stepping.py", "lower the learning rate, or look for the first loss")
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


@tries("offload/grads/gradients.py",
       "(update='backward'); use update='next_forward' if hooks need")  # fmt: skip
@pytest.mark.parametrize("way", ["after", "other"])
def test_hooks_that_look_at_gradients(way: str) -> None:
    seen: list[float] = []

    def look(p: torch.Tensor) -> None:
        if p.grad is not None:
            seen.append(p.grad.norm().item())

    def hooked(update: str) -> Any:
        model = net()
        optimizer = wrapped(model, update=update)
        layer = model[1][0]
        for p, other in ((layer.weight, layer.bias), (layer.bias, layer.weight)):
            if way == "after":
                p.register_post_accumulate_grad_hook(look)
            else:
                p.register_hook(lambda _, other=other: look(other))
        return model, optimizer

    model, optimizer = hooked("backward")
    with says("use update='next_forward' if hooks need p.grad"):
        loss_of(model).backward()
    assert not seen
    optimizer.close()
    model, optimizer = hooked("next_forward")
    with optimizer:
        for number in range(2):
            step(model, optimizer, number)
        same(model, plain_run(2))
    assert len(seen) == (4 if way == "after" else 2) and all(seen)


@tries("offload/state/param_access.py", "lost; change weights between step() and the next")
def test_a_change_after_weights_were_updated_in_backward() -> None:
    model = net()
    with wrapped(model, update="backward") as optimizer:
        step(model, optimizer)
        kept = model[0][0].weight.data
        loss_of(model, 1).backward()
        kept.mul_(2)
        with says("change weights between step() and the next backward()"):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        kept.fill_(0.5)
        assert (model[0][0].weight == 0.5).all()
        trains(model, optimizer, 2)
