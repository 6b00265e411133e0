"""The training loop stays as it is: what users do around the optimizer works unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM, normal, plainly
from tests.models import adamw, batch, train, weights
from tests.parity.twins import NVME, close, make


def test_scheduler_made_before_and_after(tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs, inner = adamw(plain), adamw(model)
    before = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
    expected = torch.optim.lr_scheduler.StepLR(theirs, 2, 0.5)
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        assert ours.param_groups[0] is inner.param_groups[0]
        for step in range(4):
            for m, o, s in ((plain, theirs, expected), (model, ours, before)):
                m(*batch(step)).backward()
                o.step()
                s.step()
                o.zero_grad()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        close(weights(model), weights(plain))
        torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 0.5)


def test_clip_grad_norm_is_exact(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for step in range(3):
        norms = []
        for m, o in ((plain, theirs), (model, ours)):
            m(*batch(step)).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5).item())
            o.step()
            o.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    close(weights(model), weights(plain))


@pytest.mark.parametrize("where", [NVME, {"device": SIM}, {"device": CPU}])
@pytest.mark.parametrize("clip", [None, "inside", "outside"])
def test_gradients_stay_until_they_are_zeroed(
    where: dict[str, Any], clip: str | None, tmp_path: Path
) -> None:
    """Two steps of one gradient, then one of a gradient that is added to it: as in torch, clipped
    gradients stay clipped."""
    plain, model = make(), make()
    theirs = adamw(plain)
    options = {**where, "max_grad_norm": 0.1 if clip == "inside" else None}
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **options) as ours:
        for m, o in ((plain, theirs), (model, ours)):
            for seed in range(2):
                m(*batch(seed)).backward()
                for _ in range(2):
                    if clip == "outside" or (clip and m is plain):
                        whole = [p.grad.clone() for p in m.parameters()] if m is plain else []
                        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                    o.step()
                    if clip == "inside" and m is plain:  # which leaves the gradients as they are
                        for p, grad in zip(m.parameters(), whole, strict=True):
                            p.grad = grad
        close(weights(model), weights(plain))


@pytest.mark.parametrize("where", [NVME, {"device": SIM}, {"device": CPU}])
def test_max_grad_norm_inside(where: dict[str, Any], tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs = adamw(plain)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, max_grad_norm=0.5, **where) as ours:
        for step in range(3):
            plain(*batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            model(*batch(step)).backward()
            ours.step()
            ours.zero_grad()
        close(weights(model), weights(plain))


def test_frozen_parameters_have_no_state_and_stay(tmp_path: Path) -> None:
    model = make()
    for p in model.blocks[1].parameters():
        p.requires_grad_(False)
    frozen = {k: v.clone() for k, v in model.blocks[1].state_dict().items()}
    optimizer = adamw(model)
    with overspill.wrap(model, optimizer, nvme=tmp_path, **NVME) as ours:
        train(model, ours, 2)
        for name, value in model.blocks[1].state_dict().items():
            assert torch.equal(value, frozen[name])
        total = sum(len(group["params"]) for group in ours.param_groups)
        assert len(ours.state_dict()["state"]) == total - 6


def test_unused_parameters_lag(tmp_path: Path) -> None:
    plain, model = make(unused=True), make(unused=True)
    theirs = adamw(plain)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME) as ours:
        train(plain, theirs, 2)
        train(model, ours, 2)
        state = ours.state_dict()["state"]
        assert len(state) == len(theirs.state_dict()["state"]) < len(list(model.parameters()))
        close(weights(model), weights(plain))


class Block(nn.Module):
    """Has a part that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        x = x + torch.tanh(self.main(x))
        return x + torch.tanh(self.extra(x)) if extra else x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, extra)
        return x.square().mean()


@pytest.mark.parametrize("device", sorted({CPU, SIM}))
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("why", ["left out", "frozen"])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_steps_have_used_may_be_unused_later(
    why: str, to_none: bool, update: str, device: str
) -> None:
    plain, model = Blocks(), Blocks()
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-2)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, inner, device=device, update=update) as ours:
        for number, used in enumerate((True, False, False, True, False)):
            for m, o in ((plain, theirs), (model, ours)):
                if why == "frozen":
                    for block in m.blocks:
                        block.extra.requires_grad_(used)
                m(normal(number, 4, 16), used or why == "frozen").backward()
                o.step()
                o.zero_grad(set_to_none=to_none)
        for name, value in weights(model).items():
            assert torch.equal(value, weights(plain)[name]), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
        (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    ],
)
def test_other_optimizers(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs, inner = kind(plain.parameters(), **options), kind(model.parameters(), **options)
    train(plain, theirs, 2)
    train(model, inner, 2)  # its state is taken over
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        train(plain, theirs, 3)
        train(model, ours, 3)
        close(weights(model), weights(plain))


def test_zero_grad_to_zeros_and_to_none(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for step in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            m(*batch(step)).backward()
            o.step()
            o.zero_grad(set_to_none=step == 1)
    close(weights(model), weights(plain))


def test_eval_without_grad_between_steps(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for step in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            train(m, o, 1)
            m.eval()
            with torch.no_grad():
                loss = m(*batch(100 + step))
            m.train()
            if m is plain:
                expected = loss
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_closure(pair: Any) -> None:
    model, ours, plain, theirs = pair

    def closure(m: nn.Module, o: torch.optim.Optimizer) -> torch.Tensor:
        o.zero_grad()
        loss: torch.Tensor = m(*batch(0))
        loss.backward()
        return loss

    for _ in range(2):
        a = theirs.step(lambda: closure(plain, theirs))
        b = ours.step(lambda: closure(model, ours))
        assert float(a) == pytest.approx(float(b), rel=1e-5)


def test_gradients_set_and_dropped_by_hand(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for m, o in ((plain, theirs), (model, ours)):
        m(*batch(0)).backward()
        m.norm.weight.grad = None
        m.norm.bias.grad = torch.full_like(m.norm.bias, 0.5)
        m.head.weight.grad.mul_(2.0)
        o.step()
    close(weights(model), weights(plain))


def test_gradient_reads_true(pair: Any) -> None:
    model, _, plain, _ = pair
    plain(*batch(0)).backward()
    model(*batch(0)).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.grad.shape == q.grad.shape
        torch.testing.assert_close(p.grad + 0, q.grad, msg=name)


def test_autocast(tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs = adamw(plain)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME) as ours:
        for step in range(3):
            for m, o in ((plain, theirs), (model, ours)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = m(*batch(step))
                loss.backward()
                o.step()
                o.zero_grad()
        close(weights(model), weights(plain), atol=3e-3)  # bf16 noise; gradients agree


def test_grad_scaler_with_fp16_weights(tmp_path: Path) -> None:
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, precision="fp16", **NVME) as ours:
        losses = []
        for step in range(4):
            loss = model(*batch(0))
            scaler.scale(loss if step != 2 else loss * float("inf")).backward()
            before = weights(model)
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
            same = all(torch.equal(v, before[k]) for k, v in weights(model).items())
            assert same == (step == 2)  # a skipped step leaves all as it was
            losses.append(loss.item())
        assert losses[-1] < losses[0]
