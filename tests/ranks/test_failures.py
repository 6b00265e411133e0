"""What goes wrong on one rank ends all at the same step, or is said on all; nothing hangs."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.movement.commit_writer import CommitWriter
from overspill.ranks import bridge, fsdp_private, sharding

from .spawned import RATES, adamw, folder_of, loss_of, net, sharded, spawn


def replicated(dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    return DistributedDataParallel(net(dtype))


OPTIONS: dict[str, Any] = {"device": "cpu", "rates": RATES, "host_memory": "1GiB"}
SPREAD = (sharded, replicated)


def wrapped(model: nn.Module, **options: Any) -> overspill.OffloadedOptimizer:
    return overspill.wrap(model, adamw(model), **OPTIONS, **options)


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
        again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
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


def not_accumulated(rank: int, size: int, folder: Path) -> None:
    """Several backward() per step that nothing announced."""
    model = sharded()
    given = {**OPTIONS, "device": "sim", "device_memory": "90KiB", "update": "backward"}
    with overspill.wrap(model, adamw(model), **given):
        loss_of(model, 0, rank).backward()
        with pytest.raises(overspill.OffloadError, match="set accumulate=N"):
            loss_of(model, 1, rank).backward()
    model = sharded()
    with wrapped(model, update="backward", accumulate=2) as optimizer:
        for micro in range(2):
            loss_of(model, micro, rank).backward()
        optimizer.step()


def refusals(rank: int, size: int, folder: Path) -> None:
    model = net()
    fully_shard(model)
    shape = fsdp_private.compute_local_shape_and_global_offset
    try:
        fsdp_private.compute_local_shape_and_global_offset = lambda *of: ((1, *shape(*of)[0]), ())
        with pytest.raises(overspill.OffloadError, match="in a way that is not supported"):
            wrapped(model)
    finally:
        fsdp_private.compute_local_shape_and_global_offset = shape
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
    with pytest.raises(overspill.IoError, match="holds a run of 2 ranks; continue"):
        wrapped(model, nvme=two)
    with pytest.raises(overspill.IoError, match="holds a run of 2 ranks; continue"):
        wrapped(model, nvme=two if rank == 0 else None)
    dist.barrier()
    three = folder_of(folder / "three")
    if rank == 0:
        shutil.copytree(two[0] / "rank-00001-of-00002", three / "rank-00000-of-00003")
    dist.barrier()
    with pytest.raises(overspill.IoError, match="holds a run of 3 ranks; continue"):
        wrapped(model, nvme=three)
    dist.barrier()
    again, _ = overspill.resume(model, two[0], adamw(model), **OPTIONS)
    with again:
        assert again.step_count == 1
        step(model, again, 1, rank)
    dist.barrier()
    model = net()
    if rank == 0:
        with pytest.raises(overspill.IoError, match="holds a run of 2 ranks; continue"):
            wrapped(model, nvme=two)
        again, _ = overspill.resume(model, two, adamw(model), **OPTIONS)
        with again:
            step(model, again, 2, rank)
        model = net()
        again, _ = overspill.resume(model, two, adamw(model), **OPTIONS)  # that is newer now
        with again:
            assert again.step_count == 3
    dist.barrier()
    if rank == 0:
        for path in two:
            (path / "overspill.manifest").unlink()
        shutil.rmtree(two[1])
    dist.barrier()
    model = sharded()
    with pytest.raises(overspill.IoError):
        overspill.resume(model, two[0], adamw(model), **OPTIONS)


def weights(model: nn.Module) -> list[torch.Tensor]:
    """All, whole, by every rank."""
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in found]


def one_cannot(rank: int, size: int, folder: Path) -> None:
    """What one rank cannot do is said on all, and all are as before."""
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / f"rank-00001-of-{size:05d}").touch()
    for spread in SPREAD:
        model = spread()
        here: Any = OSError if rank == 1 else overspill.OffloadError
        with pytest.raises(here, match="File exists"):
            wrapped(model, nvme=folder / "taken")
        with pytest.raises(ValueError, match="'step' on rank 0 and 'next_forward' on rank 1"):
            wrapped(model, update="next_forward" if rank else "step")
        run = folder_of(folder / f"cannot-{spread.__name__}")
        with wrapped(model, nvme=run) as optimizer:
            step(model, optimizer, 0, rank)
            kept = weights(model)
        model = spread()
        other = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
        here = ValueError if rank == 1 else overspill.OffloadError
        with pytest.raises(here, match="not in the model"):
            overspill.resume(model, run, adamw(model) if rank == 0 else other, **OPTIONS)
        fails_late(rank, spread, run, folder)
        again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
        with again:
            assert all(map(torch.equal, weights(model), kept))
            step(model, again, 1, rank)


def fails_late(rank: int, spread: Any, run: Path, folder: Path) -> None:
    """One rank cannot, when it has its engine: model and optimizer are as they were, on all."""
    for into in (None, folder_of(folder / "other")):
        model = spread()
        before, runs = weights(model), [b.clone() for b in model.buffers()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        real = sharding.ParamGroupCheck
        if rank == 1:
            sharding.ParamGroupCheck = None  # type: ignore[misc,assignment]
        with pytest.raises(TypeError if rank == 1 else overspill.OffloadError):
            overspill.resume(model, run, optimizer, nvme=into, **OPTIONS)
        sharding.ParamGroupCheck = real  # type: ignore[misc]
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert all(map(torch.equal, weights(model), before)), (spread, into)
        assert all(map(torch.equal, model.buffers(), runs)), (spread, into)
        threads = [thread.name for thread in threading.enumerate()]
        assert "overspill-gather" not in threads
        step(model, optimizer, 0, rank)


def goes_back(rank: int, size: int, folder: Path) -> None:
    """``rollback`` drops gradients and edits; what follows is as if they had not been."""
    for spread in SPREAD:
        losses = []
        for back in (False, True):
            model = spread()
            run = folder_of(folder / f"back-{spread.__name__}-{back}")
            with wrapped(model, nvme=run, update="next_forward", commit_every=9) as optimizer:
                step(model, optimizer, 0, rank)
                optimizer.commit()
                kept = weights(model)
                if back:
                    step(model, optimizer, 5, rank)
                    loss_of(model, 6, rank).backward()
                    with torch.no_grad():
                        for p in model.parameters():
                            p.mul_(3)
                    optimizer.rollback()
                    assert all(p.grad is None for p in model.parameters())
                    assert all(map(torch.equal, weights(model), kept))
                found = []
                for number in (1, 2):
                    loss = loss_of(model, number, rank)
                    loss.backward()
                    found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                    found.append(loss.detach())
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append([
                float(v.full_tensor() if isinstance(v, DTensor) else v) for v in found
            ])  # fmt: skip
        assert losses[0] == losses[1], spread


def last_edits(rank: int, size: int, folder: Path) -> None:
    """Edits after the last step are committed, by ``commit()`` and by the end; facts that only one
    rank has anew are no commit of its own."""
    for spread in SPREAD:
        model, seen = spread(), [0]
        run = folder_of(folder / f"edits-{spread.__name__}")
        with wrapped(model, nvme=run, extra=partial(dict, seen=seen)) as optimizer:
            step(model, optimizer, 0, rank)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            optimizer.commit()
            if rank == 0:
                seen[0] = 1
            step(model, optimizer, 1, rank)
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.5)
            kept = weights(model)
            optimizer.commit()
            if rank == 1:
                seen[0] = 2
        model = spread()
        again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
        with again:
            assert again.step_count == 2
            assert all(map(torch.equal, weights(model), kept)), spread
        if spread is sharded:
            with pytest.raises(overspill.OffloadError, match="closed"):
                weights(model)


def looks(rank: int, size: int, folder: Path) -> None:
    """A plain loop costs no look over all shards for edits that torch does not tell of."""
    model, real, count = sharded(), bridge.digest, [0]

    def counted(tensor: torch.Tensor) -> int:
        count[0] += 1
        return real(tensor)

    bridge.digest = counted  # type: ignore[assignment]
    with wrapped(model) as optimizer:
        for number in range(3):
            loss_of(model, number, rank).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert not count[0]
        weights(model)
        assert count[0]
    bridge.digest = real


def interrupts(_module: nn.Module, _args: Any) -> None:
    raise KeyboardInterrupt


def unseen_edits(rank: int, size: int, folder: Path) -> None:
    """Edits that no version tells of, after a forward that did not end; edits beside fp32 masters,
    and those that change nothing."""
    run, model = folder_of(folder / "unseen"), sharded()
    compare = CommitWriter._compare

    def late(self: CommitWriter, *saved: Any) -> None:  # the commit still saves when they come
        time.sleep(0.02)
        compare(self, *saved)

    CommitWriter._compare = late  # type: ignore[method-assign]
    with wrapped(model, nvme=run) as optimizer:
        step(model, optimizer, 0, rank)
        hook = model.head.register_forward_pre_hook(interrupts)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 1, rank)
        hook.remove()
        edited = model.layers[0].up.weight  # resharded: its layer has run
        edited.data.mul_(2.0)
        kept = edited.full_tensor().clone()  # type: ignore[attr-defined]
        optimizer.commit()
    CommitWriter._compare = compare  # type: ignore[method-assign]
    dist.barrier()
    model = sharded()
    again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
    with again:
        found = model.layers[0].up.weight.full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(found, kept)

    ends = []
    for factor in (None, 1.0, 3.0):
        model = sharded(torch.bfloat16)
        with wrapped(model, master="fp32") as optimizer:
            for number in range(3):
                step(model, optimizer, number, rank)
            if factor is not None:
                with torch.no_grad():
                    model.head.weight.mul_(factor)
            before = model.head.weight.full_tensor().float().abs().mean()  # type: ignore[attr-defined]
            step(model, optimizer, 3, rank)
            after = model.head.weight.full_tensor().float()  # type: ignore[attr-defined]
            assert 0.8 < after.abs().mean() / before < 1.2, factor
            ends.append(after)
    assert torch.equal(ends[0], ends[1]), "what was not changed keeps its master"
    assert not torch.equal(ends[1], ends[2])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def other_models(rank: int, size: int, folder: Path) -> None:
    """Modules that are sharded together; what has no rows on a rank; what is thawed, or another
    model than the stores'."""
    losses = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = Pair()
        fully_shard([model.a, model.b])  # type: ignore[arg-type]
        fully_shard(model)
        optimizer = wrapped(model) if wraps else adamw(model)
        found = []
        for number in range(3):
            loss = model(torch.full((2, 8), 1.0 + number + rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=5e-6)

    model = nn.Linear(4, 1)
    fully_shard(model)
    with pytest.raises(overspill.OffloadError, match="rank 1 has no row"):
        wrapped(model, nvme=folder_of(folder / "rows"))
    for spread in SPREAD:
        model = spread()
        frozen = next(p for name, p in model.named_parameters() if name.endswith("head.bias"))
        frozen.requires_grad_(False)
        with wrapped(model) as optimizer:
            step(model, optimizer, 0, rank)
            frozen.requires_grad_(True)
            with pytest.raises(overspill.OffloadError, match="required no grad"):
                loss_of(model, 1, rank)
        run = folder_of(folder / f"others-{spread.__name__}")
        model = spread()
        with wrapped(model, nvme=run) as optimizer:
            step(model, optimizer, 0, rank)
        model = spread(torch.bfloat16)
        with pytest.raises(overspill.OffloadError, match="float32 in the stores, and"):
            overspill.resume(model, run, adamw(model), nvme=folder / "else", **OPTIONS)
        model = spread()
        with pytest.raises(overspill.OffloadError, match="trained with adam, not sgd"):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            overspill.resume(model, run, sgd, nvme=folder / "else", **OPTIONS)


def all_of_it(rank: int, size: int, folder: Path) -> None:
    for work in (
        overflows, raises_alone, refusals, copies, folders, one_cannot, goes_back, last_edits,
        looks, unseen_edits, other_models, not_accumulated,
    ):  # fmt: skip
        work(rank, size, folder)


def test_failures(tmp_path: Path) -> None:
    spawn(2, all_of_it, tmp_path)
