"""Stores of many ranks: one commit on all of them, taken up by as many ranks, others, or one."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.io_engine.manifest import Manifest
from overspill.ranks.stores import export_run, find_run

from .spawned import RATES, Started, adamw, folder_of, loss_of, net, sharded, spawn

Seen = dict[str, torch.Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Seen:
    """Weights and moments, whole; every rank calls it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {n: full(p).detach().clone() for n, p in inner.named_parameters()}
    found["runs"] = inner.get_buffer("runs").clone()
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in inner.named_parameters()] if state else []  # before any step
    for number, name in enumerate(names):
        for key in MOMENTS:
            found[f"{name}.{key}"] = full(state[number][key]).clone()
        found[f"{name}.step"] = state[number]["step"]
    return found


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, wrong


def replicated(dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    return DistributedDataParallel(net(dtype))


def train(
    rank: int, size: int, folder: Path, until: int, begin: bool, dtype: torch.dtype,
    spread: Callable[[torch.dtype], nn.Module] = sharded,
) -> tuple[list[float], Seen, Any]:  # fmt: skip
    """Steps up to ``until``, new or resumed; losses, the state then, and what ``extra`` gave."""
    model, extra = spread(dtype), None
    options: dict[str, Any] = {
        "device": "cpu", "rates": RATES, "host_memory": "1GiB", "extra": lambda: {"rank": rank},
    }  # fmt: skip
    if begin:
        made = overspill.wrap(model, adamw(model), nvme=folder, **options)
    else:
        made, extra = overspill.resume(model, folder, adamw(model), **options)
    losses = []
    with made as optimizer:
        while optimizer.step_count < until:
            loss = loss_of(model, optimizer.step_count, rank)
            loss.backward()
            losses.append(loss.item() + torch.rand(1).item())  # what was drawn counts too
            optimizer.step()
            optimizer.zero_grad()
        return losses, state_of(model, optimizer), extra


@pytest.mark.soak  # one of these is part of the crash that is played below
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [sharded, replicated])
def test_as_many_ranks_go_on_bit_for_bit(spread: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    one, two = folder_of(tmp_path / "one"), folder_of(tmp_path / "two")
    whole_run = spawn(2, train, one, 6, True, dtype, spread)
    first = spawn(2, train, two, 3, True, dtype, spread)
    second = spawn(2, train, two, 6, False, dtype, spread)
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole_run[rank][0]
        same(second[rank][1], whole_run[rank][1])
        assert second[rank][2] == {"rank": rank}


def saved(rank: int, size: int, folder: Path) -> Seen:
    """``save`` on every rank, and again to a folder that is there."""
    model = sharded()
    with overspill.wrap(
        model, adamw(model), device="cpu", rates=RATES, host_memory="1GiB", nvme=folder,
        commit_every=5,
    ) as optimizer:  # fmt: skip
        loss_of(model, 0, rank).backward()
        optimizer.step()
        optimizer.save(folder.parent / "saved")
        with pytest.raises(overspill.OffloadError, match="is there already"):
            optimizer.save(folder.parent / "saved")
        loss_of(model, 1, rank).backward()
        before = state_of(model, optimizer)
        for (name, p), (known, weight) in zip(
            model.named_parameters(), overspill.named_weights(model), strict=True
        ):
            assert name == known and torch.equal(full(p), weight)
        return before


def looked_at(folder: Path, *more: str) -> str:
    command = [sys.executable, "-m", "overspill", "inspect", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.soak
def test_saved_and_inspected(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run")
    of_run(tmp_path / "saved", spawn(2, saved, run)[0])
    told = looked_at(run)
    assert "run of 2 ranks" in told and "step 1" in told and "checksums of the last" in told
    assert json.loads(looked_at(run, "--json"))["ranks"] == 2
    with open(run / "rank-00001-of-00002" / "overspill.store", "r+b") as file:
        data = bytearray(file.read())
        file.seek(0)
        file.write(bytes(255 - byte for byte in data))
    assert "damaged: rank-00001-of-00002" in looked_at(run)


def taken_up(
    rank: int, size: int, folder: Path, into: Path,
    spread: Callable[[], nn.Module] = sharded,
) -> tuple[int, Seen]:  # fmt: skip
    """What ranks find that resume, and that they go on to train."""
    model = spread()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # what they hold is of no account
    made, _ = overspill.resume(
        model, folder, adamw(model), device="cpu", rates=RATES, host_memory="1GiB", nvme=into
    )
    with made as optimizer:
        step, found = optimizer.step_count, state_of(model, optimizer)
        loss_of(model, 0, rank).backward()
        optimizer.step()
    return step, found


def exported(folder: Path, out: Path, expected: Seen, step: int = 3) -> None:
    """An export has whole weights, and a whole state."""
    run = find_run([folder])
    assert run is not None and run.step == step
    export_run(run, out)
    of_run(out, expected)


def of_run(out: Path, expected: Seen) -> None:
    weights = load_file(out / "model.safetensors")
    names = [name for name in expected if name in dict(net().named_parameters())]
    same({n: weights[n] for n in names}, {n: expected[n] for n in names})
    state = torch.load(out / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            for key in MOMENTS:
                assert torch.equal(state["state"][number][key], expected[f"{name}.{key}"])


def test_other_ranks_and_one_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Two ranks, then one without torch.distributed, then three replicas, then one."""
    places = [folder_of(tmp_path / name) for name in ("two", "one", "three", "alone")]
    expected = spawn(2, train, places[0], 3, True, torch.float32)[0][1]
    exported(places[0], tmp_path / "out", expected)

    def alone(folder: Path, into: Path) -> tuple[int, Seen]:
        model = net()
        made, _ = overspill.resume(
            model, folder, device="cpu", rates=RATES, host_memory="1GiB", nvme=into
        )
        with made as optimizer:
            return optimizer.step_count, state_of(model, optimizer)

    step, found = alone(places[0], places[1])
    assert step == 3
    same(found, expected)
    for step, found in spawn(3, taken_up, places[1], places[2], replicated):
        assert step == 3
        same(found, expected)
    assert alone(places[2], places[3])[0] == 4, "three ranks have taken a step more"


# -- crashes --------------------------------------------------------------------------------------


def dies_before_its_record(rank: int, size: int, folder: Path) -> None:
    """Rank 0 is killed when the others have made the commit of step 4 durable, or nearly."""
    commit = Manifest.commit

    def killed(self: Manifest, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 4:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, step, *args, **kwargs)

    if rank == 0:
        Manifest.commit = killed  # type: ignore[method-assign]
    train(rank, size, folder, 9, True, torch.float32)


def test_a_commit_that_one_rank_lacks_is_none(tmp_path: Path) -> None:
    later = spawn(2, train, folder_of(tmp_path / "later"), 6, True, torch.float32)
    run = folder_of(tmp_path / "run")
    ranks = Started(2, dies_before_its_record, run)
    ranks.end()
    found = find_run([run])
    assert found is not None and found.step == 3
    assert found.stores[1].last().step == 4, "the other one had it"
    same(spawn(2, train, run, 6, False, torch.float32)[1][1], later[1][1])


def killed_at_random(folder: Path, kills: int, seed: int, spread: Any) -> int:
    """Kills a rank again and again; each time all are at one step, with the bits of a run that
    nobody disturbed.  How many steps there were at last."""
    rng, reference = random.Random(seed), dict[int, Seen]()
    steps = 0
    for kill in range(kills):
        ranks = Started(2, train, folder, 10_000, kill == 0, torch.float32, spread)
        ranks.wait_for(folder)
        time.sleep(rng.uniform(0.0, 1.5))
        ranks.kill(rng.randrange(2))
        ranks.end()
        run = find_run([folder])
        assert run is not None and run.step >= steps
        steps = run.step
        size, into = rng.choice([1, 2, 3]), folder_of(folder.parent / "copy")
        copy = shutil.copytree(folder, into / "of")
        onto = rng.choice([sharded, replicated])
        for step, found in spawn(size, taken_up, copy, folder_of(into / "on"), onto):
            assert step == steps
            if steps not in reference:
                there = folder_of(into / "reference")
                again = spawn(2, train, there, steps, True, torch.float32, spread)
                reference[steps] = again[0][1]
            same(found, reference[steps])
        shutil.rmtree(into)
    return steps


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path: Path) -> None:
    for seed in range(10):
        spread = (sharded, replicated)[seed % 2]
        assert killed_at_random(folder_of(tmp_path / f"{seed}"), 10, seed, spread) > 0


class Counting(nn.Linear):
    """Has extra state."""

    rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"rows": self.rows}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.rows = state["rows"]


def counted(rank: int, size: int, folder: Path) -> list[str]:
    """Resume runs whose modules have extra state; what was said."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("overspill").addHandler(handler)
    options: dict[str, Any] = {"device": "cpu", "rates": RATES, "host_memory": "1GiB"}

    def made(spread: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Counting(8, 8), nn.Linear(8, 8))
        return DistributedDataParallel(model) if spread == "ddp" else fully_shard(model)

    for spread in ("ddp", "fsdp"):
        model, run = made(spread), folder_of(folder / spread)
        with overspill.wrap(model, adamw(model), nvme=run, **options) as optimizer:
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        again = made(spread)
        optimizer, _ = overspill.resume(again, run, adamw(again), **options)
        optimizer.close()
        assert not (again.module if spread == "ddp" else again)[0].rows
    return said


def test_that_states_of_modules_are_not_committed_is_said(tmp_path: Path) -> None:
    first, second = spawn(2, counted, tmp_path)
    told = [each for each in first if "do not include the extra state of these modules" in each]
    assert len(told) == 4 and not second
