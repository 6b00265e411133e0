"""What loops do between steps on several ranks: evaluation, ways back, hooks, buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.ranks.world import World, share_of_cpus

from .spawned import RATES, Net, adamw, folder_of, loss_of, sharded, spawn, step

OPTIONS: dict[str, Any] = {"device": "cpu", "rates": RATES, "host_memory": "1GiB"}


@torch.no_grad()
def evaluate(model: nn.Module, rank: int) -> None:
    """FSDP2 leaves the root's weights gathered."""
    loss_of(model, 100, rank)


class Assigns(Net):
    """A buffer gets another tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("longer", torch.zeros(0))  # in every forward

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.longer = torch.cat([self.longer, self.seen[None]])
        return super().forward(tokens)


# -- FSDP2 ----------------------------------------------------------------------------------------


def raises(model: Any, rank: int) -> None:
    """A forward that ends in the middle: what it has gathered stays."""

    def hook(*_: Any) -> None:
        raise ValueError("amid forward")

    handle = model.layers[1].register_forward_hook(hook)
    with pytest.raises(ValueError, match="amid forward"):
        loss_of(model, 100, rank)
    handle.remove()


def goes_back_after(before: Callable[[nn.Module, int], None] | None, rank: int, run: Path) -> Any:
    model = sharded()
    with overspill.wrap(
        model, adamw(model), nvme=folder_of(run), commit_every=9, **OPTIONS
    ) as optimizer:
        step(model, optimizer, 0, rank)
        optimizer.commit()
        step(model, optimizer, 1, rank)
        if before is not None:
            before(model, rank)
        optimizer.rollback()
        return [step(model, optimizer, number, rank) for number in (2, 3)]


def goes_back(rank: int, folder: Path) -> None:
    expected = goes_back_after(None, rank, folder / "plainly")
    for before in (evaluate, raises):
        assert goes_back_after(before, rank, folder / before.__name__) == expected, before.__name__


def goes_back_by_itself(rank: int, folder: Path) -> None:
    model = sharded()
    with overspill.wrap(
        model, adamw(model), nvme=folder_of(folder / "itself"), commit_every=9,
        on_nonfinite="rollback", **OPTIONS,
    ) as optimizer:  # fmt: skip
        step(model, optimizer, 0, rank)
        optimizer.commit()
        committed = dict(overspill.named_weights(model))
        step(model, optimizer, 1, rank)
        (loss_of(model, 2, rank) * float("nan")).backward()
        evaluate(model, rank)
        optimizer.step()
        evaluate(model, rank)
        assert all(p.grad is None for p in model.parameters())
        for name, value in overspill.named_weights(model):
            assert torch.equal(value, committed[name]), name


def gives_weights_after_evaluation(rank: int) -> None:
    model, policy = Net(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with overspill.wrap(model, adamw(model), **OPTIONS) as optimizer:
        step(model, optimizer, 0, rank)
        before = dict(overspill.named_weights(model))
        evaluate(model, rank)
        after = dict(overspill.named_weights(model))
    for name, value in before.items():
        assert after[name].dtype is torch.float32 and torch.equal(after[name], value), name


def is_wrapped_after(before: Callable[[nn.Module, int], None], rank: int) -> None:
    losses = []
    for wraps in (False, True):
        model = sharded()
        optimizer: Any = adamw(model)
        if wraps:
            before(model, rank)
            optimizer = overspill.wrap(model, optimizer, **OPTIONS)
        losses.append([step(model, optimizer, number, rank) for number in range(3)])
    optimizer.close()
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5


def resumes_assigned_buffers(rank: int, folder: Path) -> None:
    def made() -> Assigns:
        torch.manual_seed(0)
        model = Assigns()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    run, model = folder_of(folder / "buffers"), made()
    with overspill.wrap(model, adamw(model), nvme=run, **OPTIONS) as optimizer:
        for number in range(3):
            step(model, optimizer, number, rank)
        assert model.seen.item() == 3
        optimizer.rollback()
        assert model.seen.item() == optimizer.step_count > 0
        assert model.longer.tolist() == [1 + n for n in range(optimizer.step_count)]
        step(model, optimizer, 3, rank)
        assert model.seen.item() == optimizer.step_count
        taken = optimizer.step_count
    dist.barrier()
    model = made()
    again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
    with again:
        assert again.step_count == taken == model.seen.item()
        assert model.longer.tolist() == [1 + n for n in range(taken)]


def on_fsdp(rank: int, size: int, folder: Path) -> None:
    goes_back(rank, folder)
    goes_back_by_itself(rank, folder)
    gives_weights_after_evaluation(rank)
    is_wrapped_after(evaluate, rank)
    is_wrapped_after(raises, rank)
    resumes_assigned_buffers(rank, folder)


def test_fsdp(tmp_path: Path) -> None:
    spawn(2, on_fsdp, tmp_path)


# -- DDP ------------------------------------------------------------------------------------------


def hooks_run_once(rank: int) -> None:
    """Also where an ordinary model was wrapped before, at which torch gives the class its hooks."""

    def train(wraps: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        optimizer: Any = adamw(model)
        if wraps:
            optimizer = overspill.wrap(model, optimizer, **OPTIONS)
        norms: list[float] = []
        head = model.module.head.weight
        optimizer.register_step_pre_hook(lambda *_: norms.append(head.norm().item()))
        for number in range(3):
            step(model, optimizer, number, rank)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        if wraps:
            optimizer.close()
        return norms, weights

    alone = nn.Linear(4, 4)
    overspill.wrap(alone, adamw(alone), **OPTIONS).close()
    (expected, weights), (norms, found) = train(False), train(True)
    assert len(norms) == len(expected) == 3
    assert max(abs(a - b) for a, b in zip(norms, expected, strict=True)) < 1e-4
    for name, value in weights.items():
        assert (found[name] - value).abs().max() <= 2e-5, name


class Frozen(Net):
    """Part of it is not trained, but edited by the loop, as a momentum encoder is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up.requires_grad_(False)


def brings_frozen_weights_back(rank: int, folder: Path) -> None:
    for by_itself in (False, True):
        torch.manual_seed(0)
        run = folder_of(folder / f"frozen {by_itself}")
        model = DistributedDataParallel(Frozen())
        with overspill.wrap(
            model, adamw(model), nvme=run, commit_every=9, on_nonfinite="rollback", **OPTIONS
        ) as optimizer:
            slow = model.module.layers[0].up.weight
            step(model, optimizer, 0, rank)
            optimizer.commit()
            committed = slow.detach().clone()
            step(model, optimizer, 1, rank)
            with torch.no_grad():
                slow.mul_(3)
            loss = loss_of(model, 2, rank)
            if by_itself:
                (loss * float("nan")).backward()
                optimizer.step()
            else:
                loss.backward()
                optimizer.rollback()
            assert all(p.grad is None for p in model.parameters())
            assert torch.equal(slow.detach(), committed), by_itself
            step(model, optimizer, 3, rank)
            optimizer.commit()
            used = {name: p.detach().clone() for name, p in model.named_parameters()}
        dist.barrier()
        model = DistributedDataParallel(Frozen())
        again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
        with again:
            for name, p in model.named_parameters():
                assert torch.equal(p.detach(), used[name]), (by_itself, name)


def on_ddp(rank: int, size: int, folder: Path) -> None:
    hooks_run_once(rank)
    brings_frozen_weights_back(rank, folder)


def test_ddp(tmp_path: Path) -> None:
    spawn(2, on_ddp, tmp_path)


# -- processors -----------------------------------------------------------------------------------


def bound_to(rank: int, size: int, cpus: list[set[int]]) -> None:
    os.sched_setaffinity(0, cpus[rank])
    world = World(range(size))
    own = world.share(overspill.OffloadConfig(device="cpu", host_memory="64MiB"))
    rates = world.rates(overspill.Rates(update_params_s=8e9, disk_read_bytes_s=8e9), on_cpu=True)
    world.close()
    expected = 1.0 if cpus[0].isdisjoint(cpus[1]) else 0.5
    assert world.cpu_share == expected
    assert own.threads == max(1, int(len(cpus[rank]) * expected))
    assert (rates.update_params_s, rates.disk_read_bytes_s) == (8e9 * expected, 4e9)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_ranks_that_are_bound_to_processors_have_them_to_themselves() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    spawn(2, bound_to, [{first}, {second}])
    spawn(2, bound_to, [{first, second}] * 2)


def test_the_share_of_a_rank_in_its_processors() -> None:
    assert share_of_cpus([range(8)] * 4, range(8)) == 0.25
    halves = [range(4), range(4), range(4, 8), range(4, 8)]
    assert [share_of_cpus(halves, cpus) for cpus in halves] == [0.5] * 4
    assert share_of_cpus([range(4), range(2)], range(4)) == 0.75
