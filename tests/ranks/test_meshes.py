"""Meshes besides one dimension of rows: replicas (HSDP), tensor parallelism, columns.

Losses are those of FSDP2 with torch's AdamW on the same mesh; a commit holds on any other mesh.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import overspill

from .spawned import RATES, Net, adamw, folder_of, net, spawn, whole
from .test_fsdp import STEPS, train
from .test_resume import Seen, exported, same, state_of

CASES: list[dict[str, Any]] = [
    {"update": "step"}, {"update": "next_forward", "accumulate": 2, "clip": 0.5},
    {"update": "backward"}, {"update": "next_forward", "limit": 0.5},
]  # fmt: skip
MESHES = {  # dimensions, and their sizes
    "hsdp": {"replicate": 2, "shard": 2}, "wide hsdp": {"replicate": 4, "shard": 1},
    "narrow hsdp": {"replicate": 1, "shard": 4}, "tp": {"shard": 2, "tp": 2},
    "sequence": {"shard": 2, "tp": 2}, "all": {"replicate": 2, "shard": 1, "tp": 2},
    "tp alone": {"shard": 1, "tp": 2}, "columns": {"shard": 2},
    "rows": {"shard": 2}, "rows alone": {"shard": 1},
}  # fmt: skip


def parallel(model: Net, mesh: Any, *, sequence: bool) -> None:
    """Tensor parallelism, of all modules but the normalisations, or of these too."""
    around: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(), "down": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
        }  # fmt: skip
        around["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        around["layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, around)


def _columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None


def on_mesh(kind: str, model: Net | None = None) -> Net:
    sizes = MESHES[kind]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = net() if model is None else model
    if "tp" in sizes:
        parallel(model, mesh["tp"], sequence=kind == "sequence")
    names = tuple(name for name in sizes if name != "tp")
    options: dict[str, Any] = {"mesh": mesh[names]}
    if kind == "columns":
        options["shard_placement_fn"] = _columns
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def size_of(kind: str) -> int:
    return math.prod(MESHES[kind].values())


def batch_of(kind: str, rank: int) -> int:
    """The number of a rank's batches: ranks that differ in tensor parallelism have the same."""
    return rank // MESHES[kind].get("tp", 1)


def same_everywhere(model: nn.Module) -> bool:
    """Whether ranks with the same block have the same bits."""
    mine = {
        (name, str(p.__create_chunk_list__())): p.to_local().detach().clone()  # type: ignore[operator]
        for name, p in model.named_parameters() if isinstance(p, DTensor)
    }  # fmt: skip
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return all(
        torch.equal(value, mine[key]) for each in found for key, value in each.items()
        if key in mine
    )  # fmt: skip


def clip(params: list[Any], most: float) -> torch.Tensor:
    """As torch's, which does not clip if parameters are on different meshes."""
    total = torch.stack([p.grad.full_tensor().norm() for p in params]).norm()
    for p in params:
        p.grad.mul_(torch.clamp(most / (total + 1e-6), max=1.0))
    return total


def same_losses(rank: int, size: int, folder: Path, kind: str, cases: list[dict[str, Any]]) -> None:
    batch = batch_of(kind, rank)
    clipping = clip if "tp" in MESHES[kind] else torch.nn.utils.clip_grad_norm_
    for number, case in enumerate(cases):
        if "tp" in MESHES[kind] and "clip" in case:
            case = {**{k: v for k, v in case.items() if k != "clip"}, "limit": case["clip"]}
        plain = on_mesh(kind)
        theirs = adamw(plain)
        expected = train(plain, theirs, batch, clipping=clipping, **case)
        weights, model = whole(plain), on_mesh(kind)
        more = train(plain, theirs, batch)
        options = {k: v for k, v in case.items() if k in ("update", "accumulate")}
        blocks = MESHES[kind]["shard"] * MESHES[kind].get("tp", 1)
        places: dict[str, Any] = {"device": "sim", "device_memory": 160 * 1024 // blocks}
        if number % 2:
            nvme = folder_of(folder / f"{kind}{number}")
            places |= {"nvme": nvme, "activations": "host" if "tp" in MESHES[kind] else "recompute"}
        with overspill.wrap(
            model, adamw(model), rates=RATES, host_memory="1GiB", max_grad_norm=case.get("limit"),
            **options, **places,
        ) as optimizer:  # fmt: skip
            assert train(model, optimizer, batch, **case) == pytest.approx(expected, rel=2e-6), case
            for name, value in whole(model).items():
                assert (value - weights[name]).abs().max().item() <= 2e-5, (case, name)
            assert same_everywhere(model), case
            state = optimizer.state_dict()["state"]
            assert all(each["exp_avg"].shape == p.shape for each, p in
                       zip(state.values(), model.parameters(), strict=True))  # fmt: skip
            if case["update"] != "backward" and "limit" not in case:
                assert train(model, optimizer, batch) == pytest.approx(more, rel=5e-5), case
            overspill.unwrap(model)
        assert torch.isfinite(torch.tensor(train(model, adamw(model), batch))).all()


@pytest.mark.parametrize(
    "kind, cases",
    [("hsdp", CASES[1:3]), ("tp", CASES[2:]),
     *(pytest.param(kind, CASES, marks=pytest.mark.soak) for kind in MESHES)],
)  # fmt: skip
def test_losses_are_those_of_fsdp2(kind: str, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    spawn(size_of(kind), same_losses, tmp_path, kind, cases)


def counted(rank: int, size: int, kind: str) -> list[float]:
    """The operations of each unit's forward and backward, per token, that a plan counts."""
    model = on_mesh(kind)
    options: dict[str, Any] = {"device": "cpu", "rates": RATES, "host_memory": "1GiB"}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        units = optimizer._engine.runtime.blueprint.layout.units
        return [n for unit in units for n in (unit.flops, unit.backward_flops)]


def test_plans_count_the_products_of_a_rank() -> None:
    whole_products, halves = spawn(2, counted, "rows")[0], spawn(2, counted, "tp alone")[0]
    assert sum(whole_products) > 0
    assert halves == [n // 2 for n in whole_products]


# -- weights of files -----------------------------------------------------------------------------


def filled(rank: int, size: int, folder: Path, kind: str) -> None:
    """A model on ``meta`` whose weights are read from a file, with layers that are not trained."""

    def made(model: Net) -> Net:
        model.layers.requires_grad_(False)
        return on_mesh(kind, model)

    plain = made(net())
    batch, trained = batch_of(kind, rank), [p for p in plain.parameters() if p.requires_grad]
    expected = train(plain, torch.optim.AdamW(trained, lr=1e-2), batch)
    for number, frozen in enumerate((None, None, "int8")):
        with overspill.empty_init():
            model = made(Net())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        nvme = folder_of(folder / f"run{number}") if number else None
        with overspill.wrap(
            model, optimizer, weights=folder / "model.safetensors", device="sim", rates=RATES,
            device_memory=160 * 1024 // size, host_memory="1GiB", nvme=nvme, frozen=frozen,
        ) as wrapped:  # fmt: skip
            if frozen is None:
                for name, value in whole(model).items():
                    assert torch.equal(value, net().get_parameter(name)), name
            precise = 2e-6 if frozen is None else 5e-3
            assert train(model, wrapped, batch) == pytest.approx(expected, rel=precise)
            assert same_everywhere(model)


@pytest.mark.parametrize(
    "kind", ["tp", *(pytest.param(k, marks=pytest.mark.soak) for k in ("hsdp", "all", "columns"))]
)
def test_weights_of_files(kind: str, tmp_path: Path) -> None:
    save_file(dict(net().named_parameters()), tmp_path / "model.safetensors")
    spawn(size_of(kind), filled, tmp_path, kind)


# -- commits --------------------------------------------------------------------------------------


def begun(rank: int, size: int, folder: Path, kind: str) -> Seen:
    """Some steps, and the state then."""
    model = on_mesh(kind)
    with overspill.wrap(
        model, adamw(model), device="cpu", rates=RATES, host_memory="1GiB", nvme=folder
    ) as optimizer:
        train(model, optimizer, batch_of(kind, rank))
        return state_of(model, optimizer)


def taken_up(rank: int, size: int, folder: Path, into: Path | None, kind: str) -> Seen:
    """What ranks on a mesh find that resume."""
    model = on_mesh(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    made, _ = overspill.resume(
        model, folder, adamw(model), device="cpu", rates=RATES, host_memory="1GiB", nvme=into
    )
    with made as optimizer:
        return state_of(model, optimizer)


def refused_on_another_mesh(rank: int, size: int, folder: Path, kind: str) -> None:
    model = on_mesh(kind)
    with pytest.raises(overspill.OffloadError, match="another mesh"):
        overspill.resume(model, folder, adamw(model), device="cpu", host_memory="1GiB")


@pytest.mark.parametrize(
    "kinds",
    [("tp", "hsdp", "columns"),
     *(pytest.param(kinds, marks=pytest.mark.soak) for kinds in
       (("hsdp", "sequence", "rows"), ("columns", "tp", "all"), ("rows", "all", "tp alone")))],
)  # fmt: skip
def test_a_commit_is_resumed_on_other_meshes(kinds: tuple[str, ...], tmp_path: Path) -> None:
    places = [folder_of(tmp_path / str(number)) for number in range(len(kinds) + 1)]
    first = kinds[0]
    expected = spawn(size_of(first), begun, places[0], first)[0]
    exported(places[0], tmp_path / "out", expected, STEPS)
    for found in spawn(size_of(first), taken_up, places[0], None, first):
        same(found, expected)
    if size_of(first) == size_of(kinds[1]):
        spawn(size_of(first), refused_on_another_mesh, places[0], kinds[1])
    for number, kind in enumerate(kinds[1:]):
        for found in spawn(size_of(kind), taken_up, places[number], places[number + 1], kind):
            same(found, expected)
    model = net()
    made, _ = overspill.resume(
        model, places[len(kinds) - 1], device="cpu", host_memory="1GiB", nvme=places[-1]
    )
    with made as optimizer:
        same(state_of(model, optimizer), expected)
