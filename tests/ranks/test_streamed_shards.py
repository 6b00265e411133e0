"""Shards that leave the device under FSDP2: the losses are those of FSDP2 with torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.ranks.bridge import Bridge
from overspill.ranks.sharding import Sharding

from . import test_around_steps, test_drop_in, test_failures
from .spawned import RATES, Net, adamw, folder_of, loss_of, net, sharded, spawn, whole
from .test_fsdp import CASES, train
from .test_resume import same
from .test_resume import train as trained

raw = DTensor._local_tensor.__get__  # type: ignore[attr-defined]
SMALL: dict[str, Any] = {"device": "sim", "device_memory": "64KiB"}


def streams(optimizer: Any) -> bool:
    """Whether some shards leave the device."""
    return not all(home.resident for home in optimizer.plan.detail.layout.homes)


def of_fsdp(kept: bool | int = True) -> Net:
    model = net()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=kept)
    fully_shard(model, reshard_after_forward=kept)
    return model


def same_losses(rank: int, size: int, folder: Path) -> int:
    count = 0
    for number, case in enumerate(CASES):
        kept = bool(number % 3)  # with 0, backward gathers nothing
        expected = train(plain := of_fsdp(kept), adamw(plain), rank, **case)
        weights = whole(plain)
        on_disk = number % 2 == 1
        places: dict[str, Any] = {
            "device": "sim", "device_memory": 128 * 1024 // size, "host_memory": "1GiB"
        }  # fmt: skip
        if on_disk:
            host = f"{max(240, 72 * size)}KiB"  # of all ranks: a unit of each, and little more
            places |= {"host_memory": host, "nvme": folder_of(folder / f"{number}")}
        model = of_fsdp(kept)
        options = {k: v for k, v in case.items() if k in ("update", "accumulate")}
        with overspill.wrap(
            model, adamw(model), rates=RATES, max_grad_norm=case.get("limit"), **options, **places
        ) as optimizer:
            found = train(model, optimizer, rank, **case)
            layout = optimizer.plan.detail.layout
            assert layout is not None and streams(optimizer), case
            if on_disk:
                assert any(home.weights is overspill.Tier.NVME for home in layout.homes)
            away = [home for home in layout.homes if not home.resident]
            assert any(raw(p).is_meta for p in model.parameters()) == bool(away)
            assert found == pytest.approx(expected, rel=2e-6), case
            for name, value in whole(model).items():
                assert (value - weights[name]).abs().max().item() <= 2e-5, (case, name)
            assert optimizer.memory["device"].peak_bytes <= 128 * 1024 // size
            count += 1
    return count


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_losses_are_those_of_fsdp2(size: int, tmp_path: Path) -> None:
    assert spawn(size, same_losses, tmp_path) == [len(CASES)] * size


def streamed(rank: int, size: int, work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work`` with little device memory for every model that FSDP2 has sharded."""
    seen = []

    def tight(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: nn.Module, *given: Any, **options: Any) -> Any:
            if isinstance(model, DistributedDataParallel):
                return function(model, *given, **options)
            made = function(model, *given, **{**options, **SMALL})
            seen.append(streams(made[0] if isinstance(made, tuple) else made))
            return made

        return call

    overspill.wrap, overspill.resume = tight(overspill.wrap), tight(overspill.resume)
    found = work(rank, size, *args)
    assert any(seen)
    return found


def drop_in(rank: int, size: int, folder: Path) -> None:
    for work in (test_drop_in.mixed, test_drop_in.checkpoints, test_drop_in.ends):
        work(rank, size, folder)
    test_drop_in.loops(rank, size, folder, more=False)


@pytest.mark.parametrize("work", [drop_in, test_around_steps.on_fsdp])
def test_loops_are_those_of_resident_shards(work: Callable[..., Any], tmp_path: Path) -> None:
    spawn(2, streamed, work, tmp_path)


def written_dicts(rank: int, size: int, folder: Path) -> None:
    """Tensors of state dicts are written in place, with shards on the device, in part or not."""
    real = overspill.wrap
    for number, memory in enumerate(("72KiB", "100KiB", "150KiB", "1GiB")):

        def wrap(*args: Any, memory: str = memory, **options: Any) -> Any:
            options |= {"device": "sim", "device_memory": memory, "activations": "keep"}
            return real(*args, **options)

        overspill.wrap = wrap  # type: ignore[assignment]
        test_drop_in.checkpoints(rank, size, folder_of(folder / f"{number}"))
    overspill.wrap = real


def test_state_dicts_are_written_in_place(tmp_path: Path) -> None:
    spawn(2, written_dicts, tmp_path)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    places = [folder_of(tmp_path / name) for name in ("one", "two")]
    expected = spawn(2, trained, places[0], 4, True, torch.float32, sharded)
    spawn(2, streamed, trained, places[1], 2, True, torch.float32, sharded)
    found = spawn(2, streamed, trained, places[1], 4, False, torch.float32, sharded)
    for (losses, state, _), (all_losses, whole_state, _) in zip(found, expected, strict=True):
        assert losses == all_losses[2:]
        same(state, whole_state)


def interrupted(rank: int, size: int) -> None:
    """An exception between a gather's beginning and its end leaves no unit on the device."""
    model = sharded()
    with overspill.wrap(model, adamw(model), rates=RATES, host_memory="1GiB", **SMALL) as optimizer:
        losses = [loss_of(model, 0, rank).item()]
        handle = model.layers[1].register_forward_pre_hook(test_failures.interrupts)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0, rank)
        handle.remove()
        for _ in range(2):
            losses.append(loss_of(model, 0, rank).item())
            loss_of(model, 0, rank).backward()
        assert len(set(losses)) == 1
        optimizer.step()
        assert loss_of(model, 0, rank).item() < losses[0]


def interrupted_after(rank: int, size: int) -> None:
    """An interrupt while a unit leaves the device: the next forward goes on."""
    expected = train(plain := sharded(), adamw(plain), rank)
    count, real = [0], Bridge.after_gathering

    def after(self: Bridge, each: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        real(self, each)

    model = sharded()
    with overspill.wrap(model, adamw(model), rates=RATES, host_memory="1GiB", **SMALL) as optimizer:
        Bridge.after_gathering = after  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0, rank)
        Bridge.after_gathering = real  # type: ignore[method-assign]
        assert train(model, optimizer, rank) == pytest.approx(expected, rel=2e-6)


def one_fails(rank: int, size: int) -> None:
    """An error of one rank in ``wrap``: the shards of all are as before."""
    expected = train(plain := sharded(), adamw(plain), rank)
    model, real = sharded(), Sharding._made

    def made(self: Sharding, *args: Any, **options: Any) -> Any:
        if rank == 0:
            raise ValueError("not on this rank")
        return real(self, *args, **options)

    Sharding._made = made  # type: ignore[method-assign]
    with pytest.raises((ValueError, overspill.OffloadError), match="not on this rank"):
        overspill.wrap(model, adamw(model), rates=RATES, host_memory="1GiB", **SMALL)
    Sharding._made = real  # type: ignore[method-assign]
    assert not any(raw(p).is_meta for p in model.parameters())
    with overspill.wrap(model, adamw(model), rates=RATES, host_memory="1GiB", **SMALL) as optimizer:
        assert train(model, optimizer, rank) == pytest.approx(expected, rel=2e-6)


def skipped(rank: int, size: int) -> None:
    """With updates in backward, layers that some steps leave out."""
    losses: list[list[float]] = []
    for wraps in (False, True):
        model = sharded()
        optimizer: Any = adamw(model)
        if wraps:
            optimizer = overspill.wrap(
                model, adamw(model), rates=RATES, host_memory="1GiB", update="backward", **SMALL
            )
        layers = model.layers
        losses.append([])
        for number in range(6):
            model.forward = partial(_skipping, model, number % 2)  # type: ignore[method-assign]
            loss = loss_of(model, number, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert model.layers is layers
    optimizer.close()
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)


def _skipping(model: Net, first: int, tokens: torch.Tensor) -> torch.Tensor:
    x = model.embed(tokens) + model.shift
    for layer in list(model.layers)[first:]:
        x = layer(x)
    x = model.head(x)
    made: torch.Tensor = x * (1 + model.last(x).mean())
    return made


@pytest.mark.parametrize("work", [interrupted, interrupted_after, one_fails, skipped])
def test_on_two_ranks(work: Callable[..., Any]) -> None:
    spawn(2, work)
