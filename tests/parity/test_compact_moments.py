"""Compact moments in the engine are those of the CPU optimizers, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
import overspill.optim as optim
from overspill.planning import subgroups
from tests.devices import CPU, SIM, about_cpu, plainly
from tests.models import TinyLM, adamw, train, weights
from tests.parity.test_placements import PLACEMENTS

STEPS = 4
FORMATS = [(torch.bfloat16, "split", "step"), (torch.float32, None, "backward")]


@pytest.fixture(autouse=True)
def small_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts within parameters, so that their parts must know where they lie."""
    monkeypatch.setattr(subgroups, "LARGEST_NUMEL", 8192)


def make(dtype: torch.dtype) -> TinyLM:
    """Tied weights, a vector of its own, sizes that no block divides, a block without gradients."""
    torch.manual_seed(0)
    return TinyLM(width=60, tied=True, unused=True, position=True).to(dtype)


def ours(model: TinyLM, kind: Any = optim.AdamW, **options: Any) -> Any:
    groups = [dict(group, lr=3e-3) for group in adamw(model).param_groups]
    kept = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
    return plainly(kind, kept, lr=3e-3, **options)


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for name in state.keys() - {"master"}:
            assert torch.equal(mine["state"][index][name], state[name]), (index, name)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_bits_are_the_cpu_optimizers(placement: str, moments: str, tmp_path: Path) -> None:
    for dtype, master, update in FORMATS:
        plain = make(dtype)
        optimizer = ours(plain, master=master, moments=moments)
        losses, final = train(plain, optimizer, STEPS), weights(plain)
        model = make(dtype)
        options = {**PLACEMENTS[placement], "update": update, "moments": moments}
        options["master"] = master or "auto"
        if options.get("nvme"):
            options["nvme"] = tmp_path / f"{dtype} {master} {update}"
            options["nvme"].mkdir()
        with overspill.wrap(model, adamw(model), **options) as wrapped:
            assert train(model, wrapped, STEPS) == losses
            for name, value in weights(model).items():
                assert torch.equal(value, final[name]), (name, dtype, update)
            assert_same_state(wrapped.state_dict(), optimizer.state_dict())


@about_cpu
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_state_goes_in_and_out(moments: str, tmp_path: Path) -> None:
    """A state taken over by wrap, and one loaded later, go on as the CPU optimizer's does."""
    where = {"nvme": tmp_path, "durable": False}
    options: dict[str, Any] = {**PLACEMENTS["sim nvme"], **where, "moments": moments}
    formats: dict[str, Any] = {"master": "split", "moments": moments}
    model = make(torch.bfloat16)
    optimizer = ours(model, **formats)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert any((s["master"] != s["master"].bfloat16()).any() for s in saved["state"].values())
    twin = copy.deepcopy(model)
    again = ours(twin, **formats)
    again.load_state_dict(copy.deepcopy(saved))
    start = copy.deepcopy(twin)
    losses, final = train(twin, again, 3), weights(twin)
    with overspill.wrap(model, optimizer, **options) as taken_over:
        assert train(model, taken_over, 3) == losses
        assert all(torch.equal(v, final[k]) for k, v in weights(model).items())
    with overspill.wrap(start, adamw(start), **options) as loaded:
        train(start, loaded, 1)
        loaded.load_state_dict(copy.deepcopy(saved))
        assert train(start, loaded, 3) == losses
        assert all(torch.equal(v, final[k]) for k, v in weights(start).items())
        fresh = adamw(TinyLM(width=60, tied=True, unused=True, position=True)).state_dict()
        loaded.load_state_dict(fresh)
        assert not loaded.state_dict()["state"]
        engine = start.__dict__["_overspill_engine"]
        moments_now = [
            value
            for unit in engine.runtime.parts.units
            for number in range(len(unit.chunks))
            for state in engine._contents.stored(unit.index, number).values()
            for name, value in state.items()
            if name != "master"
        ]
        assert moments_now and not any(value.any() for value in moments_now)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_loaded_state_goes_on_as_the_one_that_was_saved(moments: str, tmp_path: Path) -> None:
    """Bit for bit: what was rounded once is not rounded again."""

    def wrapped(seed: int) -> tuple[TinyLM, overspill.OffloadedOptimizer]:
        torch.manual_seed(seed)
        model = TinyLM()
        folder = tmp_path / str(seed)
        folder.mkdir()
        options = {"device_memory": "700KiB", "host_memory": "1500KiB", "nvme": folder}
        return model, overspill.wrap(model, adamw(model), device=SIM, moments=moments, **options)

    model, optimizer = wrapped(0)
    train(model, optimizer, 8)
    other, resumed = wrapped(1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    again, state = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(torch.equal(v, again[n][k]) for n, s in state.items() for k, v in s.items())
    assert train(other, resumed, 4) == train(model, optimizer, 4)
    optimizer.close()
    resumed.close()


@about_cpu
def test_moments_that_do_not_start_at_zero(tmp_path: Path) -> None:
    start = {"initial_accumulator_value": 0.1}
    plain, model = make(torch.float32), make(torch.float32)
    losses = train(plain, ours(plain, optim.Adagrad, **start), 3)
    options: dict[str, Any] = {**PLACEMENTS["sim nvme"], "nvme": tmp_path}
    with overspill.wrap(model, ours(model, optim.Adagrad, **start), **options) as wrapped:
        assert train(model, wrapped, 3) == losses
        final = weights(plain)
        assert all(torch.equal(v, final[k]) for k, v in weights(model).items())


@about_cpu
def test_formats_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = make(torch.bfloat16)
    with pytest.raises(ValueError, match=r"stores its moments as 'int8'.*moments='int8' to wrap"):
        overspill.wrap(model, ours(model, moments="int8"), device=CPU)
    with pytest.raises(ValueError, match="amsgrad needs moments='fp32'"):
        overspill.wrap(model, ours(model, amsgrad=True), device=CPU, moments="int8")
    assert overspill.plan(model, ours(model), device=CPU, moments="int8").fits
