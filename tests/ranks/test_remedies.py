"""What is refused where a model is spread over ranks, and its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.io_engine.store_file import STORE_NAME

from .spawned import RATES, adamw, folder_of, loss_of, net, sharded, spawn, step, whole

OPTIONS: dict[str, Any] = {"device": "cpu", "rates": RATES, "host_memory": "1GiB"}


def wrapped(model: nn.Module, **options: Any) -> Any:
    return overspill.wrap(model, adamw(model), **OPTIONS, **options)


def trains(model: nn.Module, rank: int, optimizer: Any = None, **options: Any) -> None:
    with optimizer or wrapped(model, **options) as made:
        step(model, made, 0, rank)


def refused(part: str, model: nn.Module, **options: Any) -> None:
    with pytest.raises((overspill.OffloadError, ValueError)) as caught:
        wrapped(model, **options)
    assert part in str(caught.value), str(caught.value)


def of_sharding(rank: int, size: int, folder: Path) -> None:
    model = net()
    fully_shard(model.layers[0])
    refused("call fully_shard on the whole model", model)
    fully_shard(model)
    trains(model, rank)
    model = net()
    fully_shard(model)
    with pytest.raises(TypeError, match="use an optimizer that updates element by element"):
        overspill.wrap(model, torch.optim.NAdam(model.parameters()), **OPTIONS)
    with pytest.raises(TypeError, match="give all parameters to the param groups of one"):
        overspill.wrap(model, [adamw(model)], **OPTIONS)
    with pytest.raises(overspill.OffloadError, match="wrap it in a call of its own"):
        overspill.wrap({"a": model, "b": net()}, adamw(model), **OPTIONS)
    trains(model, rank)
    model = net()
    fully_shard(model, ignored_params={model.head.weight})
    refused("call fully_shard on the whole model too, without ignored_params", model)
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "shard")))
    trains(model, rank, nvme=folder_of(folder / "hsdp"))
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    trains(model, rank)
    model = net()
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    trains(model, rank)
    model = net()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))["b"]
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model)
    refused("call fully_shard on all of them with one mesh", model)
    trains(sharded(), rank)  # without all these


def of_building(rank: int, size: int, folder: Path) -> None:
    model = net()
    early = adamw(model)
    fully_shard(model)
    with pytest.raises(ValueError, match="after the model was spread over ranks"):
        overspill.wrap(model, early, **OPTIONS)
    optimizer = wrapped(model)
    with pytest.raises(overspill.OffloadError, match=r"wrapped already; call overspill\.unwrap"):
        wrapped(model)
    overspill.unwrap(model)
    refused("leave it out", model, units=["layers.0"])
    trains(model, rank)
    with torch.device("meta"):
        model = net()
    fully_shard(model)
    refused("pass weights= (safetensors, or a Hugging Face folder)", model)
    file = folder / f"weights-{rank}.safetensors"
    save_file({name: t.contiguous() for name, t in net().state_dict().items()}, file)
    trains(model, rank, weights=file)
    model = nn.Linear(4, 1)
    fully_shard(model)
    refused("use fewer ranks, or leave nvme out", model, nvme=folder_of(folder / "rows"))
    wrapped(model).close()
    assert optimizer is not None


def of_state(rank: int, size: int, folder: Path) -> None:
    for spread in (sharded, lambda: DistributedDataParallel(net())):
        model = spread()
        with wrapped(model) as optimizer:
            step(model, optimizer, 0, rank)
            kept = optimizer.state_dict()
            with pytest.raises(overspill.OffloadError, match=r"use optimizer\.load_state_dict"):
                optimizer.state = {}
            optimizer.load_state_dict(kept)
            with pytest.raises((overspill.OffloadError, ValueError, TypeError), match="not a path"):
                optimizer.load_state_dict(str(folder))
            assert dict(overspill.named_weights(model))
            step(model, optimizer, 1, rank)


def of_ddp(rank: int, size: int, folder: Path) -> None:
    model = DistributedDataParallel(net())
    refused("use update='next_forward'", model, update="backward")
    trains(model, rank, update="next_forward")
    model = DistributedDataParallel(net())
    file = folder / f"ddp-{rank}.safetensors"
    save_file({name: t.contiguous() for name, t in net().state_dict().items()}, file)
    refused("without frozen= or weights=, since all", model, resident=["head"])
    refused("convert the model before creating DDP", model, precision="bf16")
    trains(model, rank)
    trains(DistributedDataParallel(net(torch.bfloat16)), rank)
    inside = net()
    inside.head.requires_grad_(False).to("meta")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        inside, ["head.weight", "head.bias"]
    )
    model = DistributedDataParallel(inside)
    refused("if this is a frozen parameter that DDP ignores, pass weights=", model)
    trains(model, rank, weights=file, resident=["head"])
    model = DistributedDataParallel(net())
    optimizer = wrapped(model)
    with model.join(), pytest.raises(overspill.OffloadError, match="as many batches"):
        step(model, optimizer, 0, rank)
    optimizer.close()
    model = DistributedDataParallel(net())
    with wrapped(model) as optimizer:
        for number in range(2):  # as many batches on each rank
            step(model, optimizer, number, rank)


def of_changes(rank: int, size: int, folder: Path) -> None:
    """A parameter that was replaced; gradients that are sparse, or not finite."""
    model = sharded()
    optimizer = wrapped(model)
    step(model, optimizer, 0, rank)
    old, new = model.head.weight, nn.Parameter(model.head.weight.detach() * 2)
    model.head.weight = new
    with pytest.raises(overspill.OffloadError, match="replaced after the model was wrapped; put"):
        step(model, optimizer, 1, rank)
    model.head.weight = old
    with torch.no_grad():
        old.data.copy_(new)
    assert torch.equal(whole(model)["head.weight"], new.full_tensor())
    optimizer.zero_grad()
    step(model, optimizer, 1, rank)
    optimizer.close()
    model = sharded()
    old, new = model.head.weight, nn.Parameter(model.head.weight.detach() * 2)
    model.head.weight = new
    refused("replaced after fully_shard, which still uses the old one; put that back", model)
    model.head.weight = old
    old.data.copy_(new)
    trains(model, rank)

    model = DistributedDataParallel(net())
    with wrapped(model) as optimizer:
        step(model, optimizer, 0, rank)
        loss_of(model, 1, rank).backward()
        weight = model.module.embed.weight
        dense = weight.grad.clone()
        weight.grad = dense.to_sparse()
        with pytest.raises(overspill.OffloadError, match="is sparse; use dense ones"):
            optimizer.step()
        weight.grad = dense
        optimizer.step()

    run = folder_of(folder / "not-finite")
    model = sharded()
    with wrapped(model, nvme=run, update="next_forward") as optimizer:
        step(model, optimizer, 0, rank)
        optimizer.commit()
        if rank == 0:
            with torch.no_grad():
                model.head.weight.to_local().fill_(float("inf"))
        with pytest.raises(overspill.OffloadError) as caught:
            optimizer.commit()
        assert "lower the learning rate in optimizer.param_groups" in str(caught.value), caught
    model = sharded()
    again, _ = overspill.resume(model, run, adamw(model), **OPTIONS)
    with again:
        again.param_groups[0]["lr"] = 1e-3
        step(model, again, 1, rank)
        again.commit()


def of_stores(rank: int, size: int, folder: Path) -> None:
    """A store that is resumed by a model that is spread in another way; one that is damaged."""
    with torch.device("meta"):
        mixed = net()
    mixed.last = net().last
    fully_shard(mixed)
    file = folder / f"mixed-{rank}.safetensors"
    save_file({name: t.contiguous() for name, t in net().state_dict().items()}, file)
    trains(mixed, rank, weights=file)  # also where only some of it is on meta
    trains(sharded(), rank)
    run = folder_of(folder / "run")
    model = DistributedDataParallel(net())
    with wrapped(model, nvme=run) as optimizer:
        step(model, optimizer, 0, rank)
        with pytest.raises(overspill.OffloadError, match="resume the run later"):
            optimizer.sleep()
        optimizer.commit()
    model = sharded()
    with pytest.raises(overspill.OffloadError, match="spread in another way") as caught:
        overspill.resume(model, run, adamw(model), **OPTIONS)
    assert "pass nvme= with another folder to continue in" in str(caught.value)
    other = folder_of(folder / "other")
    again, _ = overspill.resume(model, run, adamw(model), nvme=other, **OPTIONS)
    with again:
        assert again.step_count == 1
        step(model, again, 1, rank)


def damaged(folder: Path) -> None:
    """The remedy of what is said where the stores of a run are to be repaired at once."""
    run = folder / "run"
    store = min(run.glob("rank-*"))
    with open(store / STORE_NAME, "r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(bytes(255 - byte for byte in data))
    done = CliRunner().invoke(app, ["inspect", str(run), "--repair", "--yes"])
    assert done.exit_code == 2 and "name the folder of the rank" in done.output
    done = CliRunner().invoke(app, ["inspect", str(store), "--repair", "--yes"])
    assert "repair mends one store" not in done.output and "nothing was changed" in done.output
    rest = [each for each in run.glob("rank-*") if each != store]  # they are not touched
    assert all(CliRunner().invoke(app, ["inspect", str(each)]).exit_code == 0 for each in rest)


def all_of_it(rank: int, size: int, folder: Path) -> None:
    for work in (of_sharding, of_building, of_state, of_ddp, of_changes, of_stores):
        work(rank, size, folder)


def test_remedies(tmp_path: Path) -> None:
    spawn(2, all_of_it, tmp_path)
    damaged(tmp_path)
