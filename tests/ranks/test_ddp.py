"""Models inside of ``DistributedDataParallel``: the losses of torch's AdamW."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overspill

from .spawned import RATES, VOCABULARY, Net, adamw, folder_of, loss_of, net, spawn, step

STEPS = 5
CASES: list[dict[str, Any]] = [
    {"update": "step"}, {"update": "next_forward"}, {"update": "next_forward", "accumulate": 2},
    {"update": "next_forward", "clip": 0.5}, {"update": "step", "limit": 0.5, "accumulate": 2},
]  # fmt: skip
Optimizer = torch.optim.Optimizer
Seen = dict[str, torch.Tensor]


class Odd(Net):
    """Some of it is frozen, tied, a single number, unused in a step, or of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up.requires_grad_(False)
        self.head.weight = self.embed.weight
        self.scale, self.few = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, 5))
        self.spare = nn.Linear(4, 4)
        self.uses_spare = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = super().forward(tokens) * self.scale * self.few.mean()
        return out * (1 + self.spare(torch.ones(4)).mean()) if self.uses_spare else out


def replicated(kind: type[Net] = Net, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(kind(), **options)


def wrapped(model: nn.Module, device: str = "cpu", **options: Any) -> overspill.OffloadedOptimizer:
    return overspill.wrap(
        model, adamw(model), device=device, rates=RATES, host_memory="1GiB", **options
    )


def train(
    model: DistributedDataParallel, optimizer: Optimizer, rank: int, *, accumulate: int = 1,
    clip: float | None = None, limit: float | None = None, update: str = "",
) -> list[float]:  # fmt: skip
    losses = []
    inside = isinstance(optimizer, overspill.OffloadedOptimizer)
    most = clip or (None if inside else limit)
    for number in range(STEPS):
        for micro in range(accumulate):
            with model.no_sync() if micro < accumulate - 1 else nullcontext():
                loss = loss_of(model, number * accumulate + micro, rank) / accumulate
                loss.backward()
            losses.append(loss.item())
        if most is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            losses += [norm.item()] if clip else []
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: nn.Module) -> Seen:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def close(found: Seen, expected: Seen) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 2e-5, name


def same_losses(rank: int, size: int, folder: Path) -> None:
    for number, case in enumerate(CASES):
        model = replicated(gradient_as_bucket_view=number % 2 == 1)
        expected = train(model, adamw(model), rank, **case)
        weights = weights_of(model)
        for device in ("cpu", "sim"):
            nvme = folder_of(folder / f"{number}{device}") if number % 2 else None
            model = replicated(gradient_as_bucket_view=number % 2 == 1)
            options = {"update": case["update"], "max_grad_norm": case.get("limit")}
            with wrapped(model, device, nvme=nvme, **options) as optimizer:
                found = train(model, optimizer, rank, **case)
                assert found == pytest.approx(expected, rel=2e-6), (case, device)
                close(weights_of(model), weights)


# -- loops ----------------------------------------------------------------------------------------


def edits(model: Any, optimizer: Optimizer, rank: int) -> list[float]:
    losses = [step(model, optimizer, 0, rank)]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    losses.append(step(model, optimizer, 1, rank))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    losses.append(step(model, optimizer, 2, rank))
    for p in model.module.head.parameters():
        p.data.mul_(1.1)
    losses.append(step(model, optimizer, 3, rank))
    model.load_state_dict(kept)
    return [*losses, step(model, optimizer, 4, rank), step(model, optimizer, 5, rank)]


def gradients(model: Any, optimizer: Optimizer, rank: int) -> list[float]:
    """They are scaled, replaced, left at zero, left out, and left where they are."""
    losses = []
    for number in range(7):
        loss = loss_of(model, number, rank)
        loss.backward()
        losses.append(loss.item())
        for p in model.module.layers.parameters():
            if number == 1:
                p.grad.mul_(2.0)
            elif number == 2:
                p.grad = p.grad * 0.5
            elif number == 3:
                p.grad.zero_()
            elif number == 4:
                p.grad = None
        optimizer.step()
        if number != 5:  # then the next backward adds to it
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    return losses


def one_rank_alone(model: Any, optimizer: Optimizer, rank: int) -> list[float]:
    """One rank evaluates, or saves, and the other does not; who reads gets what the step made."""
    found = []
    for number in range(4):
        found.append(step(model, optimizer, number, rank))
        if number % 2 == rank:
            with torch.no_grad():
                model.eval()
                found.append(loss_of(model.module, 100, rank).item())
                model.train()
            found += [value.float().sum().item() for value in model.state_dict().values()]
        found.append(model.module.head.weight[3:5].sum().item())
        found.append(torch.stack([p.norm() for p in model.parameters()]).sum().item())
    return found


def schedule(model: Any, optimizer: Optimizer, rank: int) -> list[float]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    losses = []
    for number in range(4):
        losses.append(step(model, optimizer, number, rank))
        scheduler.step()
    return losses


def spare(model: Any, optimizer: Optimizer, rank: int) -> list[float]:
    """A part is used by one rank, by both, by none."""
    losses = []
    for number, users in enumerate([(), (0,), (0, 1), (), (1,)]):
        model.module.uses_spare = rank in users
        losses.append(step(model, optimizer, number, rank))
    return losses


LOOPS: list[tuple[Callable[..., list[float]], type[Net], dict[str, Any]]] = [
    (edits, Net, {}), (gradients, Net, {"gradient_as_bucket_view": True}),
    (one_rank_alone, Net, {}), (schedule, Net, {"static_graph": True}), (edits, Odd, {
        "find_unused_parameters": True}), (spare, Odd, {"find_unused_parameters": True}),
]  # fmt: skip


def loops(rank: int, size: int, folder: Path) -> None:
    for loop, kind, options in LOOPS:
        model = replicated(kind, **options)
        expected = loop(model, adamw(model), rank)
        weights = weights_of(model)
        model = replicated(kind, **options)
        with wrapped(model) as optimizer:
            found = loop(model, optimizer, rank)
            assert found == pytest.approx(expected, rel=5e-6, abs=1e-4), loop.__name__
            close(weights_of(model), weights)


def states(rank: int, size: int, folder: Path) -> None:
    """A state dict is that of torch's optimizer, which takes it over, and gives it."""
    model = replicated(Odd, find_unused_parameters=True)
    plain = adamw(model)
    before = [step(model, plain, number, rank) for number in range(2)]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(plain.state_dict())
    expected = [step(model, plain, number, rank) for number in range(2, 4)]

    model = replicated(Odd, find_unused_parameters=True)
    with wrapped(model) as optimizer:
        assert not optimizer.state_dict()["state"]
        assert before == pytest.approx(
            [step(model, optimizer, n, rank) for n in range(2)], rel=1e-5
        )
        found = optimizer.state_dict()
        assert found["state"].keys() == state["state"].keys()
        for number, each in state["state"].items():
            for key, value in each.items():
                ours = found["state"][number][key]
                assert ours.shape == value.shape
                off = (ours - value).abs().max().item()
                assert off <= 1e-4 * value.abs().max().item(), (number, key, off, value)
        for (_, p), (_, ours) in zip(
            model.module.named_parameters(), overspill.named_weights(model), strict=True
        ):
            assert torch.equal(ours, p) and ours.data_ptr() != p.data_ptr()
        for number, p in enumerate(model.parameters()):
            if p is model.module.few:
                ours = optimizer.state[p]["exp_avg"]
                assert torch.equal(ours, found["state"][number]["exp_avg"])
        assert len(optimizer.state) == len(state["state"])
        step(model, optimizer, 9, rank)
        model.load_state_dict(kept)
        optimizer.load_state_dict(state)
        again = [step(model, optimizer, number, rank) for number in range(2, 4)]
        assert again == pytest.approx(expected, rel=5e-6)


def ends(rank: int, size: int, folder: Path) -> None:
    model = replicated()
    optimizer = wrapped(model)
    step(model, optimizer, 0, rank)
    for each in (model, model.module):
        with pytest.raises(overspill.OffloadError, match="wrapped"):
            wrapped(each)
    held = optimizer.memory[overspill.Tier.HOST].held_bytes
    whole = sum(p.numel() for p in model.parameters())
    assert held <= 16 * whole / size + 16 * 64 * len(list(model.parameters())) + 64 * 4096
    before = weights_of(model)
    overspill.unwrap(model)
    assert type(model.module.head.weight) is nn.Parameter
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    step(model, adamw(model), 1, rank)
    optimizer = wrapped(model)
    step(model, optimizer, 2, rank)
    optimizer.close()
    assert torch.isfinite(model.module.head.weight).all(), "weights stay where they are"
    with pytest.raises(overspill.OffloadError, match="closed"):
        loss_of(model, 3, rank)


def refusals(rank: int, size: int, folder: Path) -> None:
    model = replicated()
    with pytest.raises(ValueError, match="final only when backward is over"):
        wrapped(model, update="backward")
    with pytest.raises(ValueError, match="reserved memory for gradients"):
        wrapped(model, precision="bf16")
    with pytest.raises(ValueError, match="not in the model"):
        overspill.wrap(model, adamw(net()), device="cpu", rates=RATES, host_memory="1GiB")
    with pytest.raises(overspill.BudgetError) as caught:
        overspill.wrap(model, adamw(model), device="cpu", rates=RATES, host_memory="64KiB")
    told = re.search(
        r"would fit: host_memory='(\w+)' \(host_memory: in total for the machine's (\d) ranks",
        str(caught.value),
    )
    assert told is not None and int(told[2]) == size, caught.value
    least = int(told[1].removesuffix("KiB"))
    with pytest.raises(overspill.BudgetError):
        overspill.wrap(
            model, adamw(model), device="cpu", rates=RATES, host_memory=f"{least * 9 // 10}KiB"
        )
    with overspill.wrap(model, adamw(model), device="cpu", rates=RATES, host_memory=told[1]):
        overspill.unwrap(model)
    step(model, adamw(model), 0, rank)  # it is as it was
    optimizer = wrapped(model)
    with model.join(), pytest.raises(overspill.OffloadError, match="join"):
        step(model, optimizer, 0, rank)
    optimizer.close()


def all_of_it(rank: int, size: int, folder: Path) -> None:
    for work in (same_losses, loops, states, ends, refusals):
        work(rank, size, folder)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ddp(size: int, tmp_path: Path) -> None:
    assert VOCABULARY % 3, "rows of some parameters do not divide"
    spawn(size, all_of_it, tmp_path)
