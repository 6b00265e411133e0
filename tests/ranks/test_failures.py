"""What goes wrong on one rank ends all at the same step, or is said on all; nothing hangs."""

from __future__ import annotations

import copy
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import overspill

from .spawned import RATES, adamw, folder_of, loss_of, net, sharded, spawn


def replicated() -> DistributedDataParallel:
    return DistributedDataParallel(net())


def wrapped(model: nn.Module, **options: Any) -> overspill.OffloadedOptimizer:
    return overspill.wrap(
        model, adamw(model), device="cpu", rates=RATES, host_memory="1GiB", **options
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    loss_of(model, number, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def poisoned(model: nn.Module, now: list[bool]) -> None:
    """Once it is ``now``, one element of a gradient, of the first rank's rows, is finite, but its
    square is not."""
    p = next(p for name, p in model.named_parameters() if name.endswith("head.weight"))

    def poison(p: torch.Tensor) -> None:
        assert p.grad is not None
        local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if now and dist.get_rank() == 0:
            local[0, 0] = 1e30

    p.register_post_accumulate_grad_hook(poison)


def overflows(rank: int, size: int, folder: Path) -> None:
    """An update is not finite on the first rank alone: every rank says so in the same call, and
    the run goes on from the last commit that all have."""
    cases = [
        (sharded, "step", "raise"), (sharded, "next_forward", "rollback"),
        (sharded, "backward", "rollback"), (replicated, "step", "rollback"),
        (replicated, "next_forward", "raise"),
    ]  # fmt: skip
    for number, (spread, update, policy) in enumerate(cases):
        run, model, now = folder_of(folder / f"{number}"), spread(), list[bool]()
        poisoned(model, now)
        options: dict[str, Any] = {"update": update, "on_nonfinite": policy, "nvme": run}
        taken = 0
        refused = pytest.raises(overspill.OffloadError, match="not finite")
        with refused, wrapped(model, **options) as optimizer:
            for taken in range(6):
                if taken == 3:
                    now.append(True)
                loss_of(model, taken, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [0] * size
        dist.all_gather_object(found, taken)
        assert len(set(found)) == 1, (spread, update, policy, found)
        model = spread()
        again, _ = overspill.resume(
            model, run, adamw(model), device="cpu", rates=RATES, host_memory="1GiB"
        )
        with again:
            assert again.step_count == 3, (spread, update, policy)
            step(model, again, 3, rank)


def raises_alone(rank: int, size: int, folder: Path) -> None:
    """An error on one rank comes up there at once, though the others wait for that rank."""
    model = sharded()
    began = time.monotonic()
    try:
        with wrapped(model, nvme=folder_of(folder / "alone")) as optimizer:
            for number in range(3):
                step(model, optimizer, number, rank)
            if rank == 0:
                raise KeyError("the cause")
            dist.recv(torch.zeros(1), src=0)
    except KeyError:
        assert time.monotonic() - began < 20
    if rank == 0:
        dist.send(torch.zeros(1), dst=1)


def refusals(rank: int, size: int, folder: Path) -> None:
    model = net()
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(overspill.OffloadError, match="not by its rows"):
        wrapped(model)
    model = net()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    assert alone is not None
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))["b"]
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model)
    with pytest.raises(overspill.OffloadError, match="different ranks"):
        wrapped(model)


class Empty(nn.Module):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.none = net(), nn.Parameter(torch.zeros(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) + self.none.sum()


def copies(rank: int, size: int, folder: Path) -> None:
    model = DistributedDataParallel(Empty())
    with wrapped(model, update="step") as optimizer:
        held = [p.data for p in model.parameters()]
        step(model, optimizer, 0, rank)
        for known, p in zip(held, model.parameters(), strict=True):
            assert torch.equal(known, p), "with update='step' tensors over weights follow"
        copied = copy.deepcopy(model.module)
        for mine, p in zip(copied.parameters(), model.parameters(), strict=True):
            assert type(mine) is nn.Parameter and torch.equal(mine, p)
        step(model, optimizer, 1, rank)
        loss_of(copied, 2, rank).backward()


def folders(rank: int, size: int, folder: Path) -> None:
    """A run in a folder that has one, and a striped one of which one folder is named."""
    two = [folder_of(folder / "a"), folder_of(folder / "b")]
    model = sharded()
    with wrapped(model, nvme=two) as optimizer:
        step(model, optimizer, 0, rank)
    model = sharded()
    with pytest.raises(overspill.IoError, match="holds a run of 2 ranks"):
        wrapped(model, nvme=two)
    dist.barrier()
    options: dict[str, Any] = {"device": "cpu", "rates": RATES, "host_memory": "1GiB"}
    again, _ = overspill.resume(model, two[0], adamw(model), **options)
    with again:
        assert again.step_count == 1
        step(model, again, 1, rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(two[1])
    dist.barrier()
    model = sharded()
    with pytest.raises(overspill.IoError):
        overspill.resume(model, two[0], adamw(model), **options)


def all_of_it(rank: int, size: int, folder: Path) -> None:
    for work in (overflows, raises_alone, refusals, copies, folders):
        work(rank, size, folder)


def test_failures(tmp_path: Path) -> None:
    spawn(2, all_of_it, tmp_path)
