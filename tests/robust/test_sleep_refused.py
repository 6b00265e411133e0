"""What ``sleep`` refuses, and what goes wrong while an engine sleeps: nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill import OffloadError, Tier
from overspill.activations import offloader
from overspill.movement.memory import Memory
from tests.devices import SIM, about_cpu, normal
from tests.parity.nets import PLACES, WIDTH, Net, adam, nets, wrapped
from tests.remedies.table import says

ALL_THERE = {"device": SIM, "device_memory": "8MiB", "host_memory": "8MiB"}
WHERE = {**PLACES, "all there": ALL_THERE}


def sleepy(tmp_path: Path, place: str = "device", **options: Any) -> tuple[Net, Any]:
    model = Net(1)
    given = {"nvme": tmp_path, "rates": overspill.Rates(), **WHERE[place], **options}
    return model, overspill.wrap(model, torch.optim.AdamW(model.parameters(), 0.01), **given)


def trains(model: nn.Module, optimizer: Any) -> None:
    """What was refused has changed nothing: the engine trains."""
    model(normal(1, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.sleep()
    model(normal(2, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    optimizer.close()


@pytest.mark.parametrize("place", WHERE)
def test_a_graph_that_is_kept(place: str, tmp_path: Path) -> None:
    model, optimizer = sleepy(tmp_path, place)
    loss = model(normal(0, 4, WIDTH)).square().mean()
    optimizer.sleep(host=True)
    loss.backward()  # it holds handles alone, and reads the weights again
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(normal(0, 4, WIDTH)).square().mean().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    del loss
    trains(model, optimizer)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("policy", ["auto", "host", "nvme", "recompute"])
def test_a_graph_whose_activations_have_left(
    policy: str, host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)
    found = []
    for sleeps in (False, True):
        (folder := tmp_path / str(sleeps)).mkdir()
        model, optimizer = sleepy(
            folder, activations=policy, host_memory="2MiB", device_memory="256KiB", tokens=512
        )
        with optimizer:
            loss = model(normal(0, 512, WIDTH)).square().mean()
            if sleeps:
                try:
                    optimizer.sleep(host=host)
                except OffloadError as error:
                    assert host and "activations of a forward" in str(error), error
            loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
            del loss
            optimizer.step()
            optimizer.sleep(host=host)
            found[-1] += [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("place", ["roomy", "all there"])
def test_a_graph_is_whole_after_a_sleep_that_was_refused(place: str, tmp_path: Path) -> None:
    model, optimizer = sleepy(tmp_path, place, activations="keep")
    loss = model(normal(0, 4, WIDTH)).square().mean()
    with pytest.raises(OffloadError, match="tensors still refer to the weights"):
        optimizer.sleep(host=True)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    del loss
    optimizer.sleep(host=True)
    model(normal(0, 4, WIDTH)).square().mean().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    trains(model, optimizer)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("frozen", ["int8", "nf4"])
def test_packed_weights(frozen: str, host: bool, tmp_path: Path) -> None:
    """Their pages are on the device, where compute unpacks them."""
    model = Net(3).to(torch.bfloat16).requires_grad_(False)
    x = normal(0, 4, WIDTH).to(torch.bfloat16)
    with (
        overspill.wrap(
            model, nvme=tmp_path, frozen=frozen, rates=overspill.Rates(), **PLACES["device"]
        ) as made,
        torch.no_grad(),
    ):
        expected, weights = model(x), dict(overspill.named_weights(model))
        for _ in range(3):
            made.sleep(host=host)
            found = dict(overspill.named_weights(model))
            assert all(torch.equal(found[name], weight) for name, weight in weights.items())
            assert torch.equal(model(x), expected)


@about_cpu
def test_reading_takes_no_pages(tmp_path: Path) -> None:
    models = nets()
    (made,) = wrapped(models, [adam(models["a"].parameters(), plain=False)], nvme=tmp_path,
                      **PLACES["tight"])  # fmt: skip
    made.sleep(host=True)
    lease = made._engine.runtime.memory.lease
    assert lease.resident_bytes() == 0
    for model in models.values():
        assert all(value.isfinite().all() for _, value in overspill.named_weights(model))
    assert models["a"].last.weight.data.isfinite().all()
    assert lease.resident_bytes() == 0
    made.close()


def test_a_tensor_over_a_slot(tmp_path: Path) -> None:
    model, optimizer = sleepy(tmp_path, "all there")
    kept: list[torch.Tensor] = []
    hook = model.last.register_forward_hook(lambda m, *_: kept.append(m.weight.detach()))
    with torch.no_grad():
        model(normal(0, 4, WIDTH))
    hook.remove()
    with pytest.raises(OffloadError, match=r"tensors still refer to the weights of .*last"):
        optimizer.sleep()
    assert kept[0].isfinite().all()
    kept.clear()
    trains(model, optimizer)


def test_activations_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)
    model, optimizer = sleepy(
        tmp_path, activations="host", host_memory="2MiB", device_memory="256KiB", tokens=512
    )
    loss = model(normal(0, 512, WIDTH)).square().mean()
    assert optimizer.memory[Tier.HOST].held_bytes > 0
    with says("activations of a forward that was not followed by backward", OffloadError):
        optimizer.sleep(host=True)
    loss.backward()
    optimizer.sleep(host=True)
    assert optimizer.memory[Tier.HOST].held_bytes == 0
    del loss
    optimizer.zero_grad()
    trains(model, optimizer)


def test_while_the_model_runs(tmp_path: Path) -> None:
    model, optimizer = sleepy(tmp_path)
    raised: list[OffloadError] = []

    def hook(*_: Any) -> None:
        try:
            optimizer.sleep()
        except OffloadError as error:
            raised.append(error)

    handle = model.blocks[1].register_forward_hook(hook)
    out = model(normal(0, 4, WIDTH))
    handle.remove()
    assert len(raised) == 1 and "while the model runs" in str(raised[0])
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del out
    with overspill.materialized(model), pytest.raises(OffloadError, match="materialized"):
        optimizer.sleep()
    trains(model, optimizer)


def test_no_disk_for_host_memory(tmp_path: Path) -> None:
    model, optimizer = sleepy(tmp_path, nvme=None, host_memory="8MiB")
    with pytest.raises(OffloadError, match="pass nvme="):
        optimizer.sleep(host=True)
    with pytest.raises(TypeError, match="host must be True or False"):
        optimizer.sleep(host="yes")
    optimizer.sleep()
    assert optimizer.memory[Tier.DEVICE].held_bytes == 0
    trains(model, optimizer)
    model, optimizer = sleepy(tmp_path)
    optimizer.sleep(host=True)
    trains(model, optimizer)


def test_no_room_for_copies_of_device_memory(tmp_path: Path) -> None:
    """They go to disk instead, if there is one."""
    model, optimizer = sleepy(tmp_path, "all there", nvme=None, host_memory="80KiB")
    with pytest.raises(overspill.BudgetError, match="raise host_memory, or pass nvme="):
        optimizer.sleep()
    optimizer.close()
    model, optimizer = sleepy(tmp_path, "all there", nvme=None)
    optimizer.sleep()
    assert optimizer.memory[Tier.DEVICE].held_bytes == 0
    trains(model, optimizer)
    model, optimizer = sleepy(tmp_path, "all there", host_memory="80KiB")
    optimizer.sleep()
    assert optimizer.memory[Tier.DEVICE].held_bytes == 0
    trains(model, optimizer)


def test_memory_that_is_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sleepy(tmp_path)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.sleep(host=True)
    with monkeypatch.context() as patch:

        def none(self: Memory) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(Memory, "_allocate_device", none)
        for _ in range(2):
            with pytest.raises(OffloadError, match="cannot wake: its device memory"):
                model(normal(0, 4, WIDTH))
        for _ in range(2):  # host memory is back, and then freed again
            found = dict(overspill.named_weights(model))
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            optimizer.sleep(host=True)
            assert optimizer.memory[Tier.HOST].held_bytes == 0
    trains(model, optimizer)


def test_host_memory_that_is_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would end a process that takes more than there is."""
    model, optimizer = sleepy(tmp_path)
    optimizer.sleep(host=True)
    with monkeypatch.context() as patch:
        patch.setattr("overspill.movement.memory.free_pages", lambda: {"the machine": 4096})
        with says("host memory is needed, and the machine has 4 KiB free", OffloadError):
            optimizer.wake()
        assert optimizer.memory[Tier.HOST].held_bytes == 0
    trains(model, optimizer)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sleepy(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise overspill.IoError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("overspill.movement.arena_copies.IoEngine", full)
        with pytest.raises(overspill.IoError):
            optimizer.sleep(host=True)
    assert optimizer.memory[Tier.HOST].held_bytes > 0
    trains(model, optimizer)
