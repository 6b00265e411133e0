"""What loops do with a sharded model and its optimizer has torch's meaning, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import overspill

from .spawned import RATES, Net, adamw, folder_of, loss_of, net, sharded, spawn, whole

Optimizer = torch.optim.Optimizer


def wrapped(model: nn.Module, **options: Any) -> overspill.OffloadedOptimizer:
    return overspill.wrap(
        model, adamw(model), device="cpu", rates=RATES, host_memory="1GiB", **options
    )


def step(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> float:
    loss = loss_of(model, number, rank)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def edits(model: Net, optimizer: Optimizer, rank: int) -> list[float]:
    """Weights are changed between steps, in place and by a state dict."""
    losses = [step(model, optimizer, 0, rank)]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    losses.append(step(model, optimizer, 1, rank))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    losses.append(step(model, optimizer, 2, rank))
    for p in model.parameters():
        p.data.mul_(1.1)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.95)
    losses.append(step(model, optimizer, 6, rank))
    with torch.no_grad():
        torch._foreach_mul_([p.detach() for p in model.parameters()], 0.95)
    with torch.no_grad():
        for p in model.head.parameters():
            p.to_local().add_(0.01)  # type: ignore[attr-defined]
    losses.append(step(model, optimizer, 5, rank))
    model.load_state_dict(kept)
    return [*losses, step(model, optimizer, 3, rank), step(model, optimizer, 4, rank)]


def gradients(model: Net, optimizer: Optimizer, rank: int) -> list[float]:
    """They are scaled, replaced, left at zero, and left out."""
    losses = []
    for number in range(6):
        loss = loss_of(model, number, rank)
        loss.backward()
        losses.append(loss.item())
        for p in model.layers.parameters():
            assert p.grad is not None
            if number == 1:
                p.grad.mul_(2.0)
            elif number == 2:
                p.grad = p.grad * 0.5
            elif number == 3:
                p.grad.zero_()
            elif number == 4:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    return losses


def between(model: Net, optimizer: Optimizer, rank: int) -> list[float]:
    """What is read after a step is what the step has made; evaluation changes nothing."""
    found = []
    for number in range(3):
        step(model, optimizer, number, rank)
        found += [whole(model)[name].sum().item() for name in ("head.weight", "embed.weight")]
        model.eval()
        with torch.no_grad():
            found.append(loss_of(model, 100, rank).item())
        model.train()
    return found


def without_sync(model: Any, optimizer: Optimizer, rank: int) -> list[float]:
    """Gradients are reduced in the last micro-step only."""
    losses = []
    for number in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, 2 * number + micro, rank) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def schedule(model: Net, optimizer: Optimizer, rank: int) -> list[float]:
    """A learning rate that changes, and groups that differ."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    losses = []
    for number in range(4):
        losses.append(step(model, optimizer, number, rank))
        scheduler.step()
    return losses


LOOPS: list[Callable[..., list[float]]] = [edits, gradients, between, without_sync, schedule]


def loops(rank: int, size: int, folder: Path, more: bool) -> None:
    for loop in LOOPS:
        for update in ("next_forward", "step", "backward") if more else ("next_forward",):
            if update == "backward" and loop is gradients:
                continue  # they are used as they come
            model = sharded()
            expected = loop(model, adamw(model), rank)
            model = sharded()
            run = folder_of(folder / f"{loop.__name__}-{update}")
            with wrapped(model, update=update, nvme=run) as optimizer:
                found = loop(model, optimizer, rank)
            assert found == pytest.approx(expected, rel=5e-6), (loop.__name__, update)


def mixed(rank: int, size: int, folder: Path) -> None:
    """FSDP2 casts fp32 shards when it gathers them."""
    losses = []
    for wraps in (False, True):
        model = net()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = wrapped(model, max_grad_norm=1.0) if wraps else adamw(model)
        found = []
        for number in range(4):
            loss = loss_of(model, number, rank)
            loss.backward()
            if not wraps:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def checkpoints(rank: int, size: int, folder: Path) -> None:
    """State goes to torch's optimizer and comes from it, by torch.distributed.checkpoint too."""
    model = sharded()
    optimizer = adamw(model)
    for number in range(2):
        step(model, optimizer, number, rank)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "torch")
    expected = [step(model, optimizer, number, rank) for number in range(2, 4)]

    model = sharded()
    ours = wrapped(model)
    step(model, ours, 7, rank)  # so that there is state to be filled
    weights, state = get_state_dict(model, ours)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "torch")
    set_state_dict(model, ours, model_state_dict=weights, optim_state_dict=state)
    found = [step(model, ours, number, rank) for number in range(2, 4)]
    assert found == pytest.approx(expected, rel=5e-6)
    weights, state = get_state_dict(model, ours)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "ours")
    expected = [step(model, ours, number, rank) for number in range(4, 6)]
    ours.close()

    model = sharded()
    optimizer = adamw(model)
    step(model, optimizer, 7, rank)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "ours")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    found = [step(model, optimizer, number, rank) for number in range(4, 6)]
    assert found == pytest.approx(expected, rel=5e-6)


def ends(rank: int, size: int, folder: Path) -> None:
    """After ``unwrap`` it trains on in memory; after ``close`` nothing runs."""
    model = sharded()
    optimizer = wrapped(model)
    step(model, optimizer, 0, rank)
    with pytest.raises(overspill.OffloadError, match="wrapped already"):
        wrapped(model)
    before = whole(model)
    overspill.unwrap(model)
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    step(model, adamw(model), 1, rank)
    optimizer = wrapped(model)
    step(model, optimizer, 2, rank)
    optimizer.close()
    with pytest.raises(overspill.OffloadError, match="closed"):
        loss_of(model, 3, rank)


def refusals(rank: int, size: int, folder: Path) -> None:
    model = net()
    fully_shard(model.layers[0])
    with pytest.raises(overspill.OffloadError, match="not sharded"):
        wrapped(model)
    for options in (
        {"units": ["layers.0"]}, {"loss": "chunked"}, {"tile": ["0"]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="not for a sharded model"):
            wrapped(sharded(), **options)
    ranked = wrapped(sharded(), loss="auto", tile="auto")
    with ranked, pytest.raises(overspill.OffloadError, match="on several ranks"):
        ranked.make_room()
    with pytest.raises(overspill.BudgetError):
        overspill.wrap(
            model := sharded(), adamw(model), device="cpu", rates=RATES, host_memory="64KiB"
        )
    step(model, adamw(model), 0, rank)  # it is as it was


def all_of_it(rank: int, size: int, folder: Path) -> None:
    for work in (mixed, checkpoints, ends, refusals):
        work(rank, size, folder)
    loops(rank, size, folder, more=False)


def test_on_two_ranks(tmp_path: Path) -> None:
    spawn(2, all_of_it, tmp_path)


@pytest.mark.soak  # where there are ranks without rows of some parameter
def test_checkpoints_on_four_ranks(tmp_path: Path) -> None:
    spawn(4, checkpoints, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_loops_with_all_ways_to_update(size: int, tmp_path: Path) -> None:
    spawn(size, loops, tmp_path, True)


def conversions(rank: int, size: int, folder: Path) -> None:
    """``double`` and the like change nothing of a wrapped model, nor of its losses."""
    for make in (sharded, lambda: nn.parallel.DistributedDataParallel(net())):
        losses: list[list[float]] = []
        for converted in (False, True):
            model = make()
            with wrapped(model) as optimizer:
                losses.append([step(model, optimizer, 0, rank)])
                if converted:
                    model.double()
                    assert {p.dtype for p in model.parameters()} == {torch.float32}
                    next(iter(model.children())).half()
                losses[-1].append(step(model, optimizer, 1, rank))
                overspill.unwrap(model)
            assert all("_apply" not in vars(module) for module in model.modules())
        assert losses[0] == losses[1]


def test_conversions_on_two_ranks(tmp_path: Path) -> None:
    spawn(2, conversions, tmp_path)


def held(rank: int, size: int, folder: Path) -> tuple[int, int]:
    """Bytes that a rank holds in host memory, and the elements of its shards."""
    model = sharded()
    with wrapped(model) as optimizer:
        step(model, optimizer, 0, rank)
        params = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
        return optimizer.memory[overspill.Tier.HOST].held_bytes, params


@pytest.mark.soak
def test_host_memory_falls_with_the_number_of_ranks(tmp_path: Path) -> None:
    """12 bytes a parameter of the rank's own (fp32 weights and two moments), and 4 of gradients;
    each parameter and each record of state begins on a border."""
    borders = 16 * 64 * len(list(net().parameters())) + 64 * 4096
    for size in (1, 4):
        for nbytes, params in spawn(size, held, tmp_path):
            assert abs(nbytes - 16 * params) <= borders, size
