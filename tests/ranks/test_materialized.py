"""``overspill.materialized`` on several ranks: whole, ordinary parameters in a block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import overspill

from .spawned import RATES, Net, adamw, folder_of, loss_of, net, sharded, spawn, step
from .test_meshes import batch_of, on_mesh, same_everywhere, size_of

STEPS = 3


def hybrid(shards: int) -> Net:
    shape = (2, shards)
    model, mesh = net(), init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


Make = Callable[[], nn.Module]
STREAMED = {"device": "sim", "device_memory": "90KiB"}
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "ddp": (lambda: DistributedDataParallel(net()), {"device": "cpu"}),
    "resident": (sharded, {"device": "cpu"}),
    "streamed": (sharded, STREAMED),
    "bf16": (lambda: sharded(torch.bfloat16), STREAMED),
    "hybrid": (partial(hybrid, 2), STREAMED),
    "alone": (partial(hybrid, 1), {"device": "cpu"}),  # shards are read without a copy
}


def plain(rank: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a run in memory, whose second layer is edited between two halves."""
    model = DistributedDataParallel(net(dtype))
    optimizer = overspill.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for number in range(2 * STEPS):
        if number == STEPS:
            edit(model.module.layers[1])
        losses.append(step(model, optimizer, number, rank))
    return losses, dict(model.module.named_parameters())


def edit(layer: nn.Module) -> None:
    """By every way of writing."""
    first, *others = layer.parameters()
    first.data *= 0.5
    for p in others:
        p.data = p.data + 0.25


def module_of(model: nn.Module) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n.removeprefix("module."): t for n, t in overspill.named_weights(model)}


def trains(rank: int, size: int, folder: Path, kind: str) -> None:
    make, options = KINDS[kind]
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    model = make()
    run = folder_of(folder / kind)
    given = {"rates": RATES, "host_memory": "1GiB", **options}
    optimizer = overspill.wrap(model, adamw(model), nvme=run, **given)
    losses = [step(model, optimizer, number, rank) for number in range(STEPS)]
    layer = module_of(model).layers[1]
    before, params = whole(model), list(model.parameters())
    with overspill.materialized(layer) as found:  # to read; edits are dropped
        assert found is layer
        assert [type(p) for p in layer.parameters()] == [nn.Parameter] * len(
            list(layer.parameters())
        )
        for name, p in layer.named_parameters():
            assert torch.equal(p, before[f"layers.1.{name}"])
        refuses(model, optimizer, rank)
        edit(layer)
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert all(torch.equal(one, before[name]) for name, one in whole(model).items())
    disagrees(model, layer, rank)
    assert all(torch.equal(one, before[name]) for name, one in whole(model).items())
    with overspill.materialized(layer, writeback=True):
        edit(layer)
    edited = whole(model)
    assert {n for n in edited if not torch.equal(edited[n], before[n])} == {
        f"layers.1.{n}" for n, _ in layer.named_parameters()
    }
    losses += [step(model, optimizer, number, rank) for number in range(STEPS, 2 * STEPS)]
    expected, weights = plain(rank, dtype)
    if kind != "bf16":  # which has masters here
        assert losses == pytest.approx(expected, rel=1e-5)
        with overspill.materialized(model):
            for name, p in module_of(model).named_parameters():
                torch.testing.assert_close(p, weights[name], rtol=1e-4, atol=1e-5)
    last = whole(model)
    optimizer.commit()
    optimizer.close()
    again = make()
    optimizer, _ = overspill.resume(again, run, adamw(again), **given)
    assert all(torch.equal(one, last[name]) for name, one in whole(again).items())
    with overspill.materialized(again, writeback=True):
        nn.init.zeros_(module_of(again).head.weight)
    assert not whole(again)["head.weight"].any()
    optimizer.close()


def loads(rank: int, size: int) -> None:
    """A block loads state dicts, converts, and refuses other shapes."""
    for kind in ("resident", "streamed", "ddp"):
        make, options = KINDS[kind]
        model = make()
        options = {"rates": RATES, "host_memory": "1GiB", **options}
        with overspill.wrap(model, adamw(model), **options) as optimizer:
            step(model, optimizer, 0, rank)
            layer, other = module_of(model).layers[1], module_of(net()).layers[0]
            with overspill.materialized(layer, writeback=True):
                layer.load_state_dict(other.state_dict())
                layer.half()
            found = whole(model)
            for name, p in other.named_parameters():
                assert torch.equal(found[f"layers.1.{name}"], p.half().float()), kind
            for shape in ((32,), (200, 32), (1, 1)):
                wrong = pytest.raises(overspill.OffloadError, match="nothing was written")
                with wrong, overspill.materialized(layer, writeback=True):
                    layer.up.weight.data = torch.ones(shape)
            assert all(torch.equal(t, found[name]) for name, t in whole(model).items())
            step(model, optimizer, 1, rank)


def zeroes(rank: int, size: int) -> None:
    """bf16 weights that become zero: their masters are zero, too."""
    for kind in ("resident", "streamed", "ddp"):
        for in_place in (False, True):
            make, options = KINDS[kind]
            model: Any = sharded(torch.bfloat16) if kind != "ddp" else make().bfloat16()
            options = {"rates": RATES, "host_memory": "1GiB", **options}
            with overspill.wrap(model, adamw(model), **options) as optimizer:
                for number in range(2):
                    step(model, optimizer, number, rank)
                p = module_of(model).layers[1].up.weight
                if in_place:
                    with torch.no_grad():
                        (p if kind == "ddp" else p.to_local()).zero_()
                else:
                    with overspill.materialized(module_of(model).layers[1], writeback=True) as part:
                        part.up.weight.data.zero_()
                assert not whole(model)["layers.1.up.weight"].any()
                step(model, optimizer, 2, rank)
                found = whole(model)["layers.1.up.weight"]
                assert found.any() and found.abs().max() < 0.03  # of a step of lr


def between(rank: int, size: int) -> None:
    """After an update inside backward, an edit is an error once."""
    for options in (KINDS["resident"][1], STREAMED):
        model = sharded()
        given = {"rates": RATES, "host_memory": "1GiB", "update": "backward", **options}
        with overspill.wrap(model, adamw(model), **given) as optimizer:
            step(model, optimizer, 0, rank)
            loss_of(model, 1, rank).backward()
            late = pytest.raises(overspill.OffloadError, match=r"layers.0")
            with late, overspill.materialized(model.layers[0], writeback=True) as layer:
                edit(layer)
            optimizer.step()
            optimizer.zero_grad()
            step(model, optimizer, 2, rank)


@pytest.mark.parametrize("work", [loads, zeroes, between])
def test_odd_uses(work: Callable[..., None]) -> None:
    spawn(2, work)


def refuses(model: nn.Module, optimizer: Any, rank: int) -> None:
    """In a block nothing else is done with the engine."""
    with pytest.raises(overspill.OffloadError, match="is materialized; leave"), torch.no_grad():
        loss_of(model, 9, rank)
    for act in (optimizer.step, optimizer.commit, lambda: dict(overspill.named_weights(model))):
        with pytest.raises(overspill.OffloadError, match="is materialized; leave"):
            act()


def disagrees(model: nn.Module, layer: nn.Module, rank: int) -> None:
    """What ranks do differently is an error on all of them."""
    other = module_of(model).layers[0] if rank else layer
    wrong = partial(pytest.raises, overspill.OffloadError)
    with wrong(match="another module than rank"), overspill.materialized(other):
        pass
    with wrong(match=r"left other values"), overspill.materialized(layer, writeback=True):
        next(layer.parameters()).data += rank
    why = "could not" if rank else "was replaced while"
    with wrong(match=why), overspill.materialized(layer, writeback=True):
        linear = next(m for m in layer.modules() if isinstance(m, nn.Linear))
        if rank == 0:
            linear.weight = nn.Parameter(linear.weight.detach() + 1)


def on_meshes(rank: int, size: int, kind: str) -> None:
    model = on_mesh(kind)
    options = {"rates": RATES, "host_memory": "1GiB", **STREAMED}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        step(model, optimizer, 0, batch_of(kind, rank))
        before = whole(model)
        with overspill.materialized(model.layers[1], writeback=True) as layer:
            assert all(
                torch.equal(p, before[f"layers.1.{name}"]) for name, p in layer.named_parameters()
            )
            edit(layer)
        like = net().layers[1]
        like.load_state_dict({n: before[f"layers.1.{n}"] for n, _ in like.named_parameters()})
        edit(like)
        expected = {**before, **{f"layers.1.{n}": p for n, p in like.named_parameters()}}
        found = whole(model)
        assert all(torch.equal(found[name], p) for name, p in expected.items())
        step(model, optimizer, 1, batch_of(kind, rank))
        assert same_everywhere(model)


@pytest.mark.parametrize("kind", ["tp", "columns"])
def test_a_layer_is_edited_on_other_meshes(kind: str) -> None:
    spawn(size_of(kind), on_meshes, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_read_and_edited(tmp_path: Path, kind: str) -> None:
    spawn(4 if kind == "hybrid" else 2, trains, tmp_path, kind)
