"""Optimizers that couple parameters: their own step runs on all of them in host memory."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prodigyopt import Prodigy
from pytorch_optimizer import load_optimizer
from torch import nn

import overspill
from overspill.optim import coupled
from tests.devices import CPU, about_cpu, normal
from tests.remedies.table import says
from tests.robust.test_interrupted_anywhere import PACKAGE, Interrupted, Tripwire

from .test_streamed_optimizers import TIGHT, WIDTH, Coupled, build, same, step

pytestmark = about_cpu
OPTIONS: dict[str, Any] = {**TIGHT["tight"], "rates": overspill.Rates()}


class Draws(torch.optim.Optimizer):
    """Draws from all global generators, in the order of its parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.rand_like(p) + random.random() + np.random.rand()
                    p.sub_(p.grad * noise, alpha=group["lr"])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_the_plan_says_so_and_other_modes_are_refused(tmp_path: Path) -> None:
    model = build()
    inner = Prodigy(model.parameters())
    plan = overspill.plan(model, inner, nvme=tmp_path, **OPTIONS)
    assert plan.fits and plan.detail.update == "step"
    assert "prodigyopt.prodigy.Prodigy steps all parameters at once" in str(plan)
    for update in ("backward", "next_forward"):
        for made in (overspill.plan, overspill.wrap):
            with says("needs the gradients of all parameters at once", ValueError):
                made(model, inner, nvme=tmp_path, update=update, **OPTIONS)
    assert not any(tmp_path.iterdir())
    with overspill.wrap(model, inner, nvme=tmp_path, **OPTIONS) as optimizer:
        step(model, optimizer, 0)


def test_what_does_not_fit_in_host_memory_is_told(tmp_path: Path) -> None:
    """Weights, gradients and four more tensors of Prodigy, in fp32: 24 bytes a parameter."""
    model = build()
    least = 24 * sum(p.numel() for p in model.parameters())
    why = "Prodigy, which couples parameters, so that it steps all of them in host memory, needs"
    with pytest.raises(overspill.BudgetError, match=why) as caught:
        overspill.wrap(model, Prodigy(model.parameters()), nvme=tmp_path, device=CPU,
                       host_memory=least, rates=overspill.Rates())  # fmt: skip
    assert caught.value.tier == "host" and caught.value.need_bytes > least
    assert not any(tmp_path.iterdir())
    raised = caught.value.need_bytes
    for make, nbytes in ((Prodigy, raised), (torch.optim.AdamW, least)):
        model, folder = build(), tmp_path / make.__name__
        folder.mkdir()
        with overspill.wrap(
            model, make(model.parameters()), nvme=folder, device=CPU, rates=overspill.Rates(),
            host_memory=nbytes,
        ) as optimizer:  # fmt: skip
            step(model, optimizer, 0)


def test_random_numbers_are_drawn_as_without_overspill(tmp_path: Path) -> None:
    plain, model = build(), build()
    its, inner = Draws(plain.parameters()), Draws(model.parameters())
    seed(3)
    for number in range(6):
        step(plain, its, number)
    seed(3)
    optimizer = overspill.wrap(model, inner, nvme=tmp_path, **OPTIONS)
    for number in range(3):
        step(model, optimizer, number)
    optimizer.close()
    model = build()
    seed(4)
    optimizer, _ = overspill.resume(model, tmp_path, Draws(model.parameters()), **OPTIONS)
    with optimizer:
        for number in range(3, 6):
            step(model, optimizer, number)
        same(model, plain)


def test_one_of_several_optimizers(tmp_path: Path) -> None:
    def split(model: nn.Module) -> list[Any]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        return [Prodigy(matrices), torch.optim.NAdam(others, lr=0.01)]

    plain, model = build(), build()
    theirs = split(plain)
    made = overspill.wrap(model, split(model), nvme=tmp_path, **OPTIONS)
    for number in range(5):
        for each, optimizers in ((plain, theirs), (model, made)):
            each(normal(number, 4, WIDTH)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    same(model, plain)
    assert made[0].param_groups[0]["d"] == theirs[0].param_groups[0]["d"] > 1e-6
    made[0].close()


def test_frozen_parameters_and_those_without_a_gradient(tmp_path: Path) -> None:
    for make in (Coupled, load_optimizer("dadaptadam")):
        plain, model = build(), build()
        for each in (plain, model):
            each[0][0].weight.requires_grad_(False)
        its, folder = make(plain.parameters()), tmp_path / make.__name__
        folder.mkdir()
        with overspill.wrap(model, make(model.parameters()), nvme=folder, **OPTIONS) as optimizer:
            for number in range(5):
                for each, o in ((plain, its), (model, optimizer)):
                    part = each[: 2 + number % 3]
                    part(normal(number, 4, WIDTH)).square().mean().backward()
                    o.step()
                    o.zero_grad()
            same(model, plain)


def test_values_in_groups_stay_the_users_and_shared(tmp_path: Path) -> None:
    """A learning rate in a tensor that the user changes, and a count that groups share."""

    class Counts(Coupled):
        def __init__(self, params: Any, lr: Any) -> None:
            super().__init__(params, lr)
            for group in self.param_groups:
                group["count"] = self.param_groups[0].get("count", [0])

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["count"][0] += 1
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(group["count"][0])
            super().step()

    def halves(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model[:2].parameters()}, {"params": model[2:].parameters()}]  # type: ignore[index]

    plain, model = build(), build()
    rates = torch.tensor(0.01), torch.tensor(0.01)
    its = Counts(halves(plain), rates[0])
    inner = Counts(halves(model), rates[1])
    with overspill.wrap(model, inner, nvme=tmp_path, **OPTIONS) as optimizer:
        for number in range(4):
            step(plain, its, number)
            step(model, optimizer, number)
            for rate in rates:
                rate.mul_(0.5)
        same(model, plain)
        first, second = optimizer.param_groups
        assert first["count"] is second["count"] and first["count"] == [8]
        assert first["lr"] is rates[1] and first["size"] == its.param_groups[0]["size"]


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_masters_of_bf16_weights_are_those_of_the_same_loop(master: str, tmp_path: Path) -> None:
    model, plain = build().bfloat16(), build().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    its = Coupled(masters)
    with overspill.wrap(
        model, Coupled(model.parameters()), nvme=tmp_path, master=master, **OPTIONS
    ) as optimizer:
        for number in range(5):
            step(model, optimizer, number)
            for part in range(2):
                plain(normal(10 * number + part, 4, WIDTH).bfloat16()).square().mean().backward()
            for exact, p in zip(masters, plain.parameters(), strict=True):
                assert p.grad is not None
                exact.grad, p.grad = p.grad.float(), None
            its.step()
            with torch.no_grad():
                for exact, p in zip(masters, plain.parameters(), strict=True):
                    p.copy_(overspill.optim.formats.round_to_upper(exact))
        same(model, plain)
        for exact, state in zip(masters, optimizer.state_dict()["state"].values(), strict=True):
            assert torch.equal(state["overspill.master"], exact)


@pytest.mark.parametrize("apart", [67, pytest.param(13, marks=pytest.mark.soak)])
def test_a_step_that_is_interrupted_anywhere_is_a_whole_one_or_none(
    apart: int, tmp_path: Path
) -> None:
    plain, model = build(), build()
    its = Coupled(plain.parameters())
    files = [
        str(coupled.__file__), f"{PACKAGE}/state/coupled_steps.py", f"{PACKAGE}/step/stepping.py"
    ]  # fmt: skip
    taken = 0
    with overspill.wrap(model, Coupled(model.parameters()), nvme=tmp_path, **OPTIONS) as optimizer:
        for within in files:
            at, reached = 1 - apart, True
            while reached:
                at += apart
                number = taken
                for each in (plain, model):
                    each(normal(number, 4, WIDTH)).square().mean().backward()
                with Tripwire(at, within) as trip, contextlib.suppress(Interrupted):
                    optimizer.step()
                reached = trip.where != "not reached"
                if optimizer.step_count == taken:
                    same(model, plain)
                    optimizer.step()
                taken += 1
                assert optimizer.step_count == taken
                its.step()
                same(model, plain)
                assert optimizer.param_groups[0]["size"] == its.param_groups[0]["size"], trip.where
                optimizer.zero_grad()
                its.zero_grad()
            assert at > 20


def test_an_error_of_its_own_step_leaves_all_as_it_was(tmp_path: Path) -> None:
    class Fails(Coupled):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.param_groups[0]["lr"] < 0:
                raise ArithmeticError("no such rate")

    plain, model = build(), build()
    its = Coupled(plain.parameters())
    with overspill.wrap(model, Fails(model.parameters()), nvme=tmp_path, **OPTIONS) as optimizer:
        step(plain, its, 0)
        step(model, optimizer, 0)
        model(normal(1, 4, WIDTH)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(ArithmeticError, match="no such rate"):
            optimizer.step()
        assert optimizer.step_count == 1
        same(model, plain)
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
        plain(normal(1, 4, WIDTH)).square().mean().backward()
        its.step()
        same(model, plain)
