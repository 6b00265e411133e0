"""``precision=`` of sharded models: 16-bit shards, whose masters begin with the former values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import overspill

from .spawned import RATES, adamw, folder_of, loss_of, net, sharded, spawn, whole

TIGHT = {"device": "sim", "device_memory": 80 * 1024}
GIVEN: dict[str, Any] = {"host_memory": "1GiB", "rates": RATES, "precision": "bf16"}
STEPS = 4


def train(model: Any, optimizer: Any, rank: int, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + STEPS):
        loss = loss_of(model, number, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone() -> list[float]:
    """Of one device, without FSDP2."""
    model = net()
    with overspill.wrap(model, adamw(model), device="cpu", **GIVEN) as optimizer:
        return train(model, optimizer, 0)


def mixed() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = net()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def precise(rank: int, size: int, folder: Path) -> None:
    expected = alone() if size == 1 else None
    plain = mixed()
    near = train(plain, adamw(plain), rank)
    reference: list[float] = []
    save_file(dict(net().named_parameters()), folder / f"of-{rank}.safetensors")
    for number, place in enumerate((
        {"device": "cpu"}, {**TIGHT, "device_memory": 80 * 1024 // size},
        {**TIGHT, "device_memory": 80 * 1024 // size, "update": "backward"},
        {"device": "cpu", "weights": folder / f"of-{rank}.safetensors"},
    )):  # fmt: skip
        model = sharded()
        if number % 2:  # FSDP2 has gathered in fp32 before
            loss_of(model, 0, rank).backward()
        run = folder_of(folder / f"{size}-{number}")
        given = {**GIVEN, "nvme": run, "commit_every": 100, **place}
        with overspill.wrap(model, adamw(model), **given) as optimizer:
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            optimizer.zero_grad()
            losses = train(model, optimizer, rank)
            assert {value.dtype for value in whole(model).values()} == {torch.bfloat16}
            masters = [s["exp_avg"].dtype for s in optimizer.state_dict()["state"].values()]
            assert set(masters) == {torch.float32}
            optimizer.commit()
            more = train(model, optimizer, rank, STEPS)
            optimizer.rollback()
            overspill.unwrap(model)
        reference = reference or losses
        assert losses == (expected or reference), place
        assert losses == pytest.approx(near, rel=2e-2)
        assert torch.isfinite(torch.tensor(train(model, adamw(model), rank))).all()
        model = sharded(torch.bfloat16)
        given = {k: v for k, v in {**GIVEN, **place}.items() if k not in ("precision", "weights")}
        again, _ = overspill.resume(model, run, adamw(model), **given)
        with again:
            assert train(model, again, rank, STEPS) == more


def undone(rank: int, size: int, folder: Path) -> None:
    """A wrap that fails leaves shards of the former dtype, with their values."""
    model = sharded()
    before = whole(model)
    for options in ({"host_memory": "8KiB"}, {"nvme": folder / "missing" / "folder"}):
        with pytest.raises((overspill.OffloadError, ValueError, OSError)):
            overspill.wrap(model, adamw(model), device="cpu", **{**GIVEN, **options})
        for name, value in whole(model).items():
            assert value.dtype == torch.float32 and torch.equal(value, before[name]), name
        loss_of(model, 0, rank).backward()
        model.zero_grad()
    train(model, adamw(model), rank)


def all_of_it(rank: int, size: int, folder: Path) -> None:
    precise(rank, size, folder)
    undone(rank, size, folder)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_precision(size: int, tmp_path: Path) -> None:
    spawn(size, all_of_it, tmp_path)
