"""What the engine owes a device with memory of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.facts.tier import Tier
from overspill.movement.accelerators.vendors import VENDORS
from tests.devices import plainly
from tests.models import TinyLM, adamw, batch, train

RATES = overspill.Rates()
STREAMED: dict[str, Any] = {
    "device": "testdev", "device_memory": "700KiB", "host_memory": "1500KiB", "durable": False
}  # fmt: skip


def step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(*batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_a_step_copies_no_pageable_memory(native: ModuleType, update: str, tmp_path: Path) -> None:
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update=update, **STREAMED
    ) as optimizer:  # fmt: skip
        batches = [batch(number) for number in range(3)]
        step(model, optimizer, 0)
        before = native.counters()
        for tokens, targets in batches:
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        after = native.counters()
    assert after["pageable_bytes"] == before["pageable_bytes"]
    assert after["tasks"] > before["tasks"] + 100


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_the_allocators_peak_is_what_was_told(update: str, tmp_path: Path) -> None:
    """Beside the budget: what a unit needs while it runs, which a plain step needs as well."""
    torch.accelerator.empty_cache()
    plain = TinyLM()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    step(plain, inner, 0)
    grown = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    step(plain, inner, 1)
    activations = torch.accelerator.max_memory_allocated() - grown
    del plain, inner
    held = torch.accelerator.memory_allocated()
    model = TinyLM().cpu()
    torch.accelerator.reset_peak_memory_stats()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update=update, **STREAMED
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 3)
        told = optimizer.memory[Tier.DEVICE].peak_bytes
        peak = torch.accelerator.max_memory_allocated() - held
    # An arena starts on a page; stubs take 1024 NaNs of every dtype.
    assert peak - told <= activations + 4096 + 4096
    assert told <= 700 << 10


def test_a_thousand_parameters_cost_no_more_than_one(tmp_path: Path) -> None:
    with torch.device("cpu"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(500)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.accelerator.empty_cache()
    held = torch.accelerator.memory_allocated()
    with overspill.wrap(
        model, inner, device="testdev", device_memory="64KiB", host_memory="16MiB", durable=False
    ) as optimizer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        told = optimizer.memory[Tier.DEVICE].held_bytes
        assert torch.accelerator.memory_allocated() - held <= told + 4096 + 4096 + 2048
    # Closed, it has given all back but the stubs, whoever still has the model and the optimizer.
    assert torch.accelerator.memory_allocated() - held <= 4096


def test_unwrap_leaves_the_model_alone_there(tmp_path: Path) -> None:
    model = TinyLM()
    own = sum(p.numel() * p.itemsize for p in model.parameters())
    before = torch.accelerator.memory_allocated()
    options = {**STREAMED, "device_memory": "64MiB", "host_memory": "64MiB"}
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **options)
    train(model, optimizer, 2)
    overspill.unwrap(model)
    assert next(model.parameters()).device.type == "testdev"
    assert torch.accelerator.memory_allocated() <= before + own // 100 + 65536


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_a_broken_device_is_closed_all_the_same(
    native: ModuleType, update: str, tmp_path: Path
) -> None:
    locked, held = native.registered_bytes(), torch.accelerator.memory_allocated()
    model = TinyLM().cpu()
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, update=update, **STREAMED)
    train(model, optimizer, 1)
    assert native.registered_bytes() > locked
    native.break_down("an illegal address, say")
    with pytest.raises((overspill.errors.OffloadError, RuntimeError), match="an illegal address"):
        train(model, optimizer, 2)
    with pytest.raises(RuntimeError, match="an illegal address"):
        optimizer.close()
    optimizer.close()
    assert native.registered_bytes() == locked
    native.break_down("")
    native.take_races()  # what was under way when the device broke was waited for by nobody
    assert torch.accelerator.memory_allocated() <= held + 8192


def test_an_interrupt_while_host_memory_is_locked(
    native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locking takes seconds; a signal that came meanwhile is raised when it is through."""
    plain = VENDORS["testdev"]
    assert plain.register is not None

    def interrupted(address: int, nbytes: int, device: torch.device) -> None:
        assert plain.register is not None
        plain.register(address, nbytes, device)
        raise KeyboardInterrupt

    locked = native.registered_bytes()
    monkeypatch.setitem(VENDORS, "testdev", replace(plain, register=interrupted))
    model = TinyLM().cpu()
    with pytest.raises(KeyboardInterrupt):
        overspill.wrap(model, adamw(model), nvme=tmp_path, rates=RATES, **STREAMED)
    assert native.registered_bytes() == locked


def test_two_open_engines_share_the_devices_memory(native: ModuleType) -> None:
    """What activations of the first may still take is not given to the second."""
    torch.accelerator.empty_cache()
    free = int(torch.accelerator.get_memory_info()[0])
    options: dict[str, Any] = {"device": "testdev", "host_memory": "64MiB", "rates": RATES}

    def budget(optimizer: Any) -> int:
        nbytes: int = optimizer.memory[Tier.DEVICE].budget_bytes
        return nbytes

    models = [TinyLM().cpu() for _ in range(2)]
    with overspill.wrap(models[0], adamw(models[0]), **options) as one:
        train(models[0], one, 2)
        with overspill.wrap(models[1], adamw(models[1]), **options) as other:
            assert budget(other) > 0 and budget(one) + budget(other) <= free
            train(models[1], other, 2)
    model = TinyLM().cpu()
    with overspill.wrap(model, adamw(model), **options) as alone:
        assert budget(alone) > 2 * budget(other)


def test_the_device_runs_out_of_memory_in_a_step(native: ModuleType, tmp_path: Path) -> None:
    """At any allocation; the step that is made again gives the bits of one that was not cut."""
    torch.manual_seed(0)
    model = TinyLM().cpu()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **STREAMED) as optimizer:
        wanted = train(model, optimizer, 3)
    cut = 0
    for room in range(0, 1 << 20, 100_000):
        again = TinyLM().cpu()
        again.load_state_dict(first)
        with overspill.wrap(again, adamw(again), nvme=tmp_path, **STREAMED) as optimizer:
            native.set_budget(torch.accelerator.memory_allocated() + room)
            try:
                again(*batch(0)).backward()
            except torch.OutOfMemoryError:
                cut += 1
            native.set_budget(4 << 30)
            optimizer.zero_grad()
            assert train(again, optimizer, 3) == wanted
    assert cut >= 3


def test_buffers_that_find_no_room_leave_the_model_whole(
    native: ModuleType, tmp_path: Path
) -> None:
    model = TinyLM()
    model.register_buffer("large", torch.zeros(1 << 20, device="cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    native.set_budget(torch.accelerator.memory_allocated() + (2 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        overspill.wrap(model, adamw(model), nvme=tmp_path, **STREAMED)
    for name, value in model.state_dict().items():
        assert value.device == before[name].device and torch.equal(value, before[name]), name


@pytest.mark.parametrize("checkpointed", ["yes", "reentrant"])
def test_gradients_are_clipped_after_backward_has_recomputed(
    checkpointed: str, tmp_path: Path
) -> None:
    """Modules are called again on the thread of autograd; the one that trains is still this."""
    plain, model = TinyLM(checkpointed=checkpointed), TinyLM(checkpointed=checkpointed)
    model.load_state_dict(plain.state_dict())
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-3)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with overspill.wrap(model, ours, nvme=tmp_path, **STREAMED) as optimizer:
        for number in range(3):
            norms = []
            for each, its in ((plain, theirs), (model, optimizer)):
                each(*batch(number)).backward()
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1e9).item())
                its.step()
                its.zero_grad()
            assert norms[1] == pytest.approx(norms[0], rel=1e-6)
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


def test_random_states_of_the_device_are_kept(tmp_path: Path) -> None:
    """Dropout after a resume is that of the run that was not cut."""

    def build() -> nn.Module:
        with torch.device("cpu"):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1))

    def run(model: nn.Module, optimizer: Any, until: int) -> None:
        while optimizer.step_count < until:
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    options: dict[str, Any] = {"device": "testdev", "host_memory": "64MiB"}
    stores = []
    for cut in (False, True):
        model, store = build(), tmp_path / str(cut)
        store.mkdir()
        torch.manual_seed(7)
        optimizer = overspill.wrap(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nvme=store, **options
        )
        run(model, optimizer, 2 if cut else 4)
        if cut:
            optimizer.close()
            torch.manual_seed(99)
            model = build()
            torch.manual_seed(99)
            optimizer, _ = overspill.resume(
                model, store, torch.optim.SGD(model.parameters(), lr=0.1), host_memory="64MiB"
            )
            run(model, optimizer, 4)
        stores.append({name: value.cpu() for name, value in model.state_dict().items()})
        optimizer.close()
    for name, value in stores[0].items():
        assert torch.equal(value, stores[1][name]), name
