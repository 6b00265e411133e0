"""Ranks whose devices have streams: what FSDP2 and DDP do beside the engine's copies is ordered.

Collectives read and write on streams of FSDP2's own, which prefetch. Every case has the losses and
weights of ranks on CPUs, bit for bit, and the device sees no two operations on the same bytes that
nothing orders. Without overspill, FSDP2 leaves such a pair: ``zero_grad`` frees gradients for the
stream that they came from, which the next backward orders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import overspill
from tests.device import staged
from tests.device.install import install
from tests.ranks.spawned import RATES, VOCABULARY, Net, adamw, folder_of, spawn
from tests.ranks.test_ddp_frozen import net, save_base
from tests.ranks.test_meshes import MESHES, batch_of, parallel, size_of

STEPS = 4
# Options that change results.
ALIKE = ("update", "accumulate", "max_grad_norm", "precision", "frozen")
native = install()
TIGHT = 160 * 1024  # bytes of all ranks' shards on their devices


def made(kind: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model: nn.Module = net() if kind == "ddp lora" else Net()
    model = model.to(device)
    if kind.startswith("ddp"):
        return DistributedDataParallel(model)
    sizes = MESHES[kind]
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    assert isinstance(model, Net)
    if "tp" in sizes:
        parallel(model, mesh["tp"], sequence=False)
    part = mesh[tuple(name for name in sizes if name != "tp")]
    for layer in model.layers:
        fully_shard(layer, mesh=part)
    fully_shard(model, mesh=part)
    return model


def loss_of(model: nn.Module, number: int, batch: int, device: str) -> torch.Tensor:
    with torch.device("cpu"):
        drawn = torch.Generator().manual_seed(1000 * number + batch)
        tokens = torch.randint(0, VOCABULARY, (4, 9), generator=drawn).to(device)
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def trained(
    kind: str, device: str, batch: int, options: dict[str, Any]
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, also of an evaluation with averages, and this rank's weights."""
    with torch.device(device):  # what the loop makes, too
        model, losses = made(kind, device), []
        given = {"host_memory": "1GiB", "rates": RATES, "device": device, **options}
        with overspill.wrap(model, overspill.ema(adamw(model), 0.5), **given) as optimizer:
            for number in range(STEPS):
                for micro in range(options.get("accumulate", 1)):
                    loss = loss_of(model, 2 * number + micro, batch, device)
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad(), optimizer.averaged():
                losses.append(loss_of(model, 99, batch, device).item())
            loss_of(model, 98, batch, device).backward()
            optimizer.step()
            overspill.unwrap(model)
        local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        return losses, [p.detach().cpu() for p in local]


def ordered(rank: int, size: int, folder: Path, kind: str, cases: list[dict[str, Any]]) -> None:
    batch = rank if kind.startswith("ddp") else batch_of(kind, rank)
    for number, case in enumerate(cases):
        alike = {k: v for k, v in case.items() if k in ALIKE}
        losses, weights = trained(kind, "cpu", batch, alike)
        if case.get("weights"):
            case = {**case, "weights": folder}
        if case.get("nvme"):
            case = {**case, "nvme": folder_of(folder / f"{kind}{number}")}
        if number % 2:
            native.set_delays(number, 20, 1000)
        found, values = trained(kind, "testdev", batch, case)
        native.set_delays(0, 0, 0)
        torch.accelerator.synchronize()
        races = native.take_races()
        assert not races, f"{kind} {case}: {len(races)} races, the first: {races[0]}"
        assert found == losses, (kind, case)
        assert all(torch.equal(a, b) for a, b in zip(values, weights, strict=True)), (kind, case)
    dist.barrier()


def _cases(blocks: int) -> list[dict[str, Any]]:
    tight = {"device_memory": TIGHT // blocks}
    return [
        {"update": "step"}, {"update": "next_forward", **tight}, {"update": "backward", **tight},
        {"update": "next_forward", **tight, "activations": "host", "max_grad_norm": 0.5},
        {"update": "next_forward", **tight, "activations": "nvme", "nvme": True, "accumulate": 2},
        {"update": "backward", **tight, "accumulate": 2, "nvme": True, "host_memory": "700KiB"},
    ]  # fmt: skip


OF_DDP: list[dict[str, Any]] = [
    {"update": "step"}, {"update": "next_forward", "max_grad_norm": 0.5},
    {"update": "next_forward", "activations": "host", "accumulate": 2},
]  # fmt: skip
OF_LORA: list[dict[str, Any]] = [
    {"update": "step", "frozen": "int8", "device_memory": "140KiB"},
    {"update": "next_forward", "weights": True, "device_memory": "140KiB", "accumulate": 2},
    {"update": "next_forward", "frozen": "int8", "device_memory": "140KiB",
     "activations": "recompute"},
]  # fmt: skip
OF_ROWS = [
    *_cases(2), {**_cases(2)[1], "activations": "recompute"},
    {**_cases(2)[1], "precision": "bf16", "device_memory": TIGHT // 4},
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, cases",
    [
        ("rows", OF_ROWS[1:4]), ("ddp", OF_DDP), ("ddp lora", OF_LORA), ("hsdp", _cases(2)[1:2]),
        *(pytest.param(kind, cases, marks=pytest.mark.soak) for kind, cases in (
            ("rows", OF_ROWS), ("hsdp", _cases(2)), ("tp alone", _cases(2)), ("tp", _cases(4)),
        )),
    ],
)  # fmt: skip
def test_what_ranks_do_is_ordered(kind: str, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    size = 2 if kind.startswith("ddp") else size_of(kind)
    save_base(tmp_path)
    spawn(size, ordered, tmp_path, kind, cases, backend=staged.NAME)


def begins(rank: int, size: int, run: Path, states: Path) -> None:
    model = made("rows alone" if size == 1 else "rows", "testdev")
    torch.manual_seed(rank)  # of the device, too
    with overspill.wrap(
        model, adamw(model), host_memory="1GiB", rates=RATES, nvme=run
    ) as optimizer:
        loss_of(model, 0, rank, "testdev").backward()
        optimizer.step()
        torch.rand(3, device="testdev")
        optimizer.commit()
        torch.save(torch.testdev.get_rng_state(), states / f"{size}-{rank}.pt")  # type: ignore[attr-defined]


def goes_on(rank: int, size: int, run: Path, into: Path, states: Path, before: int) -> None:
    """On another number of ranks: one that existed has its random numbers, others their own."""
    model = made("rows alone" if size == 1 else "rows", "testdev")
    torch.manual_seed(50 + rank)
    own = torch.testdev.get_rng_state()  # type: ignore[attr-defined]
    resumed, _ = overspill.resume(
        model, run, adamw(model), host_memory="1GiB", rates=RATES, nvme=into
    )
    with resumed:
        now = torch.testdev.get_rng_state()  # type: ignore[attr-defined]
        kept = torch.load(states / f"{before}-{rank}.pt") if rank < before else own
        assert torch.equal(now, kept)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_random_numbers_of_the_device_are_resumed(sizes: tuple[int, int], tmp_path: Path) -> None:
    run, into, states = (folder_of(tmp_path / name) for name in ("run", "into", "states"))
    spawn(sizes[0], begins, run, states, backend=staged.NAME)
    spawn(sizes[1], goes_on, run, into, states, sizes[0], backend=staged.NAME)
