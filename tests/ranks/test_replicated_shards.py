"""Shards that are replicated (HSDP): the losses of FSDP2 with torch's AdamW on the same mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overspill

from .spawned import RATES, Net, adamw, folder_of, net, spawn, whole
from .test_fsdp import train

CASES: list[dict[str, Any]] = [
    {"update": "step"}, {"update": "next_forward", "accumulate": 2, "clip": 0.5},
    {"update": "backward"}, {"update": "next_forward", "limit": 0.5},
]  # fmt: skip


def on_mesh(shape: tuple[int, int]) -> Net:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def same_everywhere(model: nn.Module, shape: tuple[int, int]) -> bool:
    """Whether replicas have the same bits."""
    flat = torch.cat([p.to_local().flatten() for p in model.parameters()])  # type: ignore[attr-defined]
    rank, (_, shards) = dist.get_rank(), shape
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, flat)
    return all(torch.equal(flat, each) for each in found[rank % shards :: shards])


def same_losses(rank: int, size: int, folder: Path, shape: tuple[int, int]) -> None:
    for number, case in enumerate(CASES):
        plain = on_mesh(shape)
        theirs = adamw(plain)
        expected = train(plain, theirs, rank, **case)
        weights, model = whole(plain), on_mesh(shape)
        more = train(plain, theirs, rank)
        options = {k: v for k, v in case.items() if k in ("update", "accumulate")}
        places: dict[str, Any] = {"device": "sim", "device_memory": 160 * 1024 // shape[1]}
        if number % 2:
            nvme = folder_of(folder / f"{shape}{number}")
            places |= {"nvme": nvme, "durable": False, "activations": "recompute"}
        with overspill.wrap(
            model, adamw(model), rates=RATES, host_memory="1GiB", max_grad_norm=case.get("limit"),
            **options, **places,
        ) as optimizer:  # fmt: skip
            assert train(model, optimizer, rank, **case) == pytest.approx(expected, rel=2e-6), case
            for name, value in whole(model).items():
                assert (value - weights[name]).abs().max().item() <= 2e-5, (case, name)
            assert same_everywhere(model, shape), case
            state = optimizer.state_dict()["state"]
            assert all(each["exp_avg"].shape == p.shape for each, p in
                       zip(state.values(), model.parameters(), strict=True))  # fmt: skip
            if case["update"] != "backward" and "limit" not in case:
                assert train(model, optimizer, rank) == pytest.approx(more, rel=5e-5), case
            overspill.unwrap(model)
        assert torch.isfinite(torch.tensor(train(model, adamw(model), rank))).all()


@pytest.mark.parametrize(
    "size, shape",
    [(4, (2, 2)), *(pytest.param(4, s, marks=pytest.mark.soak) for s in ((4, 1), (1, 4)))],
)  # fmt: skip
def test_losses_are_those_of_fsdp2(size: int, shape: tuple[int, int], tmp_path: Path) -> None:
    spawn(size, same_losses, tmp_path, shape)
