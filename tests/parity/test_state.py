"""Weights and state can be read, edited, saved and loaded at any time."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.facts.tier import Tier
from overspill.movement.pools import HeldMemory
from tests.devices import CPU, SIM, about_cpu, normal
from tests.models import adamw, train, weights
from tests.parity.twins import NVME, close, make


def test_state_dict_round_trip_through_torch(pair: Any, tmp_path: Path) -> None:
    model, ours, plain, theirs = pair
    train(plain, theirs, 3)
    train(model, ours, 3)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    expected = theirs.state_dict()
    assert state["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for number, entry in expected["state"].items():
        assert float(entry["step"]) == float(state["state"][number]["step"]) == 3
        for name in ("exp_avg", "exp_avg_sq"):
            got = state["state"][number][name]
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, entry[name].cpu(), atol=1e-6, rtol=1e-3)
    # Into another engine, from torch's own: both go on alike.
    again = make()
    folder = tmp_path / "again"
    folder.mkdir()
    with overspill.wrap(again, adamw(again), nvme=folder, **NVME) as third:
        again.load_state_dict(plain.state_dict())
        third.load_state_dict(copy.deepcopy(expected))
        train(plain, theirs, 2)
        train(again, third, 2)
        close(weights(again), weights(plain))


def test_state_of_the_given_optimizer_is_taken_over(tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs, inner = adamw(plain), adamw(model)
    train(plain, theirs, 3)
    train(model, inner, 3)
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        train(plain, theirs, 2)
        train(model, ours, 2)
        close(weights(model), weights(plain))


def test_state_dict_is_small_before_the_first_step(pair: Any) -> None:
    _, ours, _, _ = pair
    assert ours.state_dict()["state"] == {}


def test_materialized_reads_and_edits(pair: Any) -> None:
    model, ours, plain, theirs = pair
    train(plain, theirs, 1)
    train(model, ours, 1)
    with overspill.materialized(model):
        torch.testing.assert_close(model.head.weight.data, plain.head.weight.data)
        model.head.weight.data.zero_()
    with overspill.materialized(model, writeback=True):
        assert model.head.weight.data.any()
        model.norm.weight.data.mul_(2)
    plain.norm.weight.data.mul_(2)
    train(plain, theirs, 1)
    train(model, ours, 1)
    close(weights(model), weights(plain))


def test_a_part_is_materialized(pair: Any) -> None:
    """Weights of other units stay where they are."""
    model, ours, plain, theirs = pair
    train(plain, theirs, 1)
    train(model, ours, 1)
    with overspill.materialized(model.norm, writeback=True) as part:
        assert part is model.norm
        part.weight.data.mul_(2)
        with pytest.raises(overspill.OffloadError, match="is materialized; leave"):
            ours.step()
    plain.norm.weight.data.mul_(2)
    train(plain, theirs, 1)
    train(model, ours, 1)
    close(weights(model), weights(plain))
    with pytest.raises(overspill.OffloadError, match="is not wrapped"):
        overspill.materialized(plain.norm)


@pytest.mark.parametrize("writeback", [False, True])
def test_a_state_dict_is_loaded_into_what_is_materialized(pair: Any, writeback: bool) -> None:
    model, _, plain, _ = pair
    before = weights(model)
    given = {name: t + 1 for name, t in plain.state_dict().items()}
    with overspill.materialized(model, writeback=writeback):
        model.load_state_dict(given)
        close({name: p.data for name, p in model.named_parameters()}, given)
    close(weights(model), given if writeback else before)


class Zeroing(nn.Linear):
    """Its third forward sets its weight to zero."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            with torch.no_grad():
                self.weight.zero_()
        return super().forward(x)


@pytest.mark.parametrize("device", sorted({CPU, SIM}))
def test_a_weight_that_its_module_sets_to_zero_has_no_old_master(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Zeroing(16, 16)).bfloat16()
    rates = overspill.Rates()
    with overspill.wrap(model, adamw(model), device=device, rates=rates) as optimizer:
        for number in range(4):
            loss = model(normal(number, 2, 16).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = dict(overspill.named_weights(model))["1.weight"]
    assert found.isfinite().all() and found.any()


@pytest.mark.parametrize("memory", ["3MiB", "1GiB"])
@pytest.mark.parametrize("device", sorted({CPU, SIM}))
def test_unwrap_frees_all_at_once(device: str, memory: str, tmp_path: Path) -> None:
    """Some of the units are resident, or all; nobody but the model holds their weights then."""
    model = make()
    options = {"device": device, "host_memory": memory, "nvme": tmp_path, "durable": False}
    if device == SIM:
        options["device_memory"] = "900KiB" if memory == "3MiB" else memory
    optimizer = overspill.wrap(model, adamw(model), **options)
    assert any(home.resident for home in optimizer.plan.placement.values())
    train(model, optimizer, 2)
    engine, held = weakref.ref(optimizer._engine), optimizer._engine.runtime.memory._held
    overspill.unwrap(model)
    assert not any(memory is held for memory, _ in HeldMemory._lingering)
    del held
    for tier in (Tier.DEVICE, Tier.HOST):
        assert optimizer.memory[tier].held_bytes == 0, tier
    del optimizer
    gc.collect()
    assert engine() is None


def test_unwrap_gives_back_an_ordinary_model(pair: Any) -> None:
    model, ours, plain, theirs = pair
    train(plain, theirs, 2)
    train(model, ours, 2)
    assert overspill.unwrap(model) is model
    close(weights(model), weights(plain))
    assert not any(h for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks))
    copy.deepcopy(model)
    train(model, adamw(model), 1)
    with pytest.raises(overspill.OffloadError, match="not wrapped"):
        overspill.unwrap(model)


def test_state_dict_of_a_part_is_current(pair: Any) -> None:
    model, ours, _, _ = pair
    before = {k: v.clone() for k, v in model.blocks[1].state_dict().items()}
    train(model, ours, 1)
    after = model.blocks[1].state_dict()
    assert all(not torch.equal(before[k], v) for k, v in after.items())


def test_buffers_stay_and_integers_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        for step in range(3):
            x = normal(step, 4, 8)
            for m, o in ((twin, theirs), (model, ours)):
                m(x).square().sum().backward()
                o.step()
                o.zero_grad()
        got, expected = weights(model), weights(twin)
        for name in ("0.bias", "1.running_mean"):  # the gradient is zero but for rounding
            del got[name], expected[name]
        close(got, expected)


def test_frozen_weights_on_disk_can_be_loaded(tmp_path: Path) -> None:
    model = make()
    model.blocks.requires_grad_(False)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update="backward", **NVME) as ours:
        train(model, ours, 1)
        twice = {name: value * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(twice)
        assert all(torch.equal(v, twice[k]) for k, v in model.state_dict().items())
        train(model, ours, 1)


@about_cpu
def test_nothing_of_the_engine_follows_torchs_default_device(tmp_path: Path) -> None:
    """With ``torch.set_default_device``, what is made without saying where is made there."""
    seen = []
    for default in ("cpu", "meta"):
        with torch.device("cpu"):
            model, folder = make(), tmp_path / default
            folder.mkdir()
        options = {**NVME, "device": "sim", "durable": True, "rates": overspill.Rates()}
        with (
            torch.device(default),
            overspill.wrap(model, adamw(model), nvme=folder, **options) as optimizer,
        ):
            losses = [*map(float, train(model, optimizer, 2))]
            optimizer.commit()
            optimizer.rollback()
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
            losses += map(float, train(model, optimizer, 2))
            seen.append((losses, weights(model), state))
    (first, ours, moments), (second, theirs, others) = seen
    assert first == second
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for number, entry in moments["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, others["state"][number][name])
