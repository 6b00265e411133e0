"""Averages of weights on several ranks: those of torch's ``AveragedModel``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import overspill

from .spawned import RATES, adamw, folder_of, loss_of, net, sharded, spawn, step

DECAY, STEPS = 0.8, 4
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "ddp": (lambda: DistributedDataParallel(net()), {"device": "cpu"}),
    "resident": (sharded, {"device": "cpu"}),
    "streamed": (sharded, {"device": "sim", "device_memory": "90KiB"}),
}


def plain(rank: int) -> tuple[dict[str, torch.Tensor], float, float]:
    """Averages, a loss with them and one with the weights, of DDP alone."""
    model = DistributedDataParallel(net())
    optimizer = adamw(model)
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(STEPS):
        step(model, optimizer, number, rank)
        averaged.update_parameters(model.module)
    with torch.no_grad():
        losses = (loss_of(each, 9, rank).item() for each in (averaged.module.eval(), model.eval()))
        first, last = losses
    return dict(averaged.module.named_parameters()), first, last


def averages(rank: int, size: int, folder: Path) -> None:
    without_average(rank)
    expected, with_average, with_weights = plain(rank)
    for kind, (make, options) in KINDS.items():
        model, run = make(), folder_of(folder / kind)
        given = {"rates": RATES, "host_memory": "1GiB", "nvme": run, **options}
        optimizer = overspill.wrap(model, overspill.ema(adamw(model), DECAY), **given)
        for number in range(STEPS):
            step(model, optimizer, number, rank)
        model.eval()
        with torch.no_grad():
            loss_of(model, 8, rank)  # FSDP2 keeps the root's weights gathered after this
            with optimizer.averaged():
                assert loss_of(model, 9, rank).item() == pytest.approx(with_average, rel=1e-6)
                with pytest.raises(overspill.OffloadError, match=r"leave the .* block"):
                    optimizer.step()
            assert loss_of(model, 9, rank).item() == pytest.approx(with_weights, rel=1e-6), kind
        found = {n.removeprefix("module."): t for n, t in optimizer.named_averages()}
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        saves(model, optimizer, found, folder / f"{kind} average")
        edits(model, optimizer)
        model.train()
        optimizer.commit()
        found = {n.removeprefix("module."): t for n, t in optimizer.named_averages()}
        optimizer.close()
        model = make()
        del given["nvme"]
        again, _ = overspill.resume(model, run, overspill.ema(adamw(model), DECAY), **given)
        with again:
            for name, value in again.named_averages():
                assert torch.equal(value, found[name.removeprefix("module.")]), (kind, name)
            step(model, again, STEPS, rank)


def saves(
    model: nn.Module, optimizer: overspill.OffloadedOptimizer, expected: dict[str, torch.Tensor],
    out: Path,
) -> None:  # fmt: skip
    """The first rank writes; what is there already is an error on all ranks."""
    optimizer.save_average(out)
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == expected.keys() | {"runs"}
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    with pytest.raises(overspill.OffloadError, match="is there already"):
        optimizer.save_average(out)


def edits(model: nn.Module, optimizer: overspill.OffloadedOptimizer) -> None:
    """An edit before the block is one of the weight; an edit in it is one of the average."""

    def current(values: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        return next(t.clone() for n, t in values if n.endswith("layers.1.up.weight"))

    p = next(p for n, p in model.named_parameters() if n.endswith("layers.1.up.weight"))
    weight, average = current(overspill.named_weights(model)), current(optimizer.named_averages())
    with torch.no_grad():
        p.mul_(0.5)
        with optimizer.averaged():
            p.mul_(2)
            model.load_state_dict(model.state_dict())
    assert torch.equal(current(overspill.named_weights(model)), weight * 0.5)
    assert torch.equal(current(optimizer.named_averages()), average * 2)


def without_average(rank: int) -> None:
    model = sharded()
    with overspill.wrap(
        model, adamw(model), device="cpu", rates=RATES, host_memory="1GiB"
    ) as optimizer:
        with pytest.raises(overspill.OffloadError, match="there is no average"):
            list(optimizer.named_averages())
        with (
            pytest.raises(overspill.OffloadError, match="there is no average"),
            optimizer.averaged(),
        ):
            pass
        step(model, optimizer, 0, rank)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_averages_are_torch_s(size: int, tmp_path: Path) -> None:
    spawn(size, averages, tmp_path)
