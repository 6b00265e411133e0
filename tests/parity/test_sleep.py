"""An engine that sleeps between uses trains as one that does not, and its memory is free then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import overspill
from overspill import OffloadError, Tier
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal
from tests.parity.nets import PLACES, WIDTH, Net, Nets, adam, nets, two, wrapped
from tests.remedies.table import same

MIB = 1 << 20
ALL_THERE = {"device": SIM, "device_memory": "8MiB", "host_memory": "8MiB"}
WHERE = {**PLACES, "all there": ALL_THERE}
Sleep = Callable[[Any], None]


def steps(models: Nets, optimizers: list[Any], sleep: Sleep) -> list[torch.Tensor]:
    """Four steps with ``sleep`` wherever nothing runs; gradients of two backwards."""
    found = []
    for number in range(4):
        for part in range(2):
            out = models["b"](models["a"](normal(10 * number + part, 6, WIDTH)) * 0.5)
            loss = out.square().mean()
            loss.backward()
            found.append(loss.detach())
            del out, loss
            sleep(optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
            sleep(optimizer)
        found.append(models["a"].last.weight.detach().clone())
        if number != 2:
            for optimizer in optimizers:
                optimizer.zero_grad()
        sleep(optimizers[0])
        with torch.no_grad():
            found.append(models["a"](normal(99, 3, WIDTH)))
    return found


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("place", WHERE)
def test_bits_are_those_of_an_engine_that_stays_awake(
    place: str, update: str, tmp_path: Path
) -> None:
    found: list[tuple[list[torch.Tensor], Nets]] = []
    ways: list[Sleep] = [
        lambda _: None,
        lambda optimizer: optimizer.sleep(),
        lambda optimizer: optimizer.sleep(host=True),
        lambda optimizer: (optimizer.sleep(), optimizer.sleep(host=True), optimizer.wake()),
    ]
    for number, sleep in enumerate(ways):
        (folder := tmp_path / str(number)).mkdir()
        models = nets()
        made = wrapped(
            models, two(models, plain=False), nvme=folder, update=update, commit_every=3,
            **WHERE[place],
        )  # fmt: skip
        found.append((steps(models, made, sleep), overspill.unwrap(models)))
    for losses, models in found[1:]:
        assert all(map(torch.equal, losses, found[0][0]))
        for name in models:
            same(models[name], found[0][1][name])


def test_updates_in_backward(tmp_path: Path) -> None:
    """Between backward and step a part of the step is taken, and the engine says so."""
    models, awake, made, its = nets(), nets(), None, None
    for each, name in ((models, "a"), (awake, "b")):
        (folder := tmp_path / name).mkdir()
        (its,) = wrapped(each, [adam(each["a"].parameters(), plain=False)], nvme=folder,
                         update="backward", **ALL_THERE)  # fmt: skip
        made = its if made is None else made
    for number in range(3):
        for each, optimizer in ((models, made), (awake, its)):
            each["a"](normal(number, 6, WIDTH)).square().mean().backward()
            if optimizer is made:
                with pytest.raises(OffloadError, match="commit between step"):
                    made.sleep()
            optimizer.step()
            optimizer.zero_grad()
        made.sleep(host=number == 1)
    for name in models:
        same(models[name], awake[name])
    made.close()
    its.close()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("place", WHERE)
def test_memory_is_free_and_weights_are_read(place: str, host: bool, tmp_path: Path) -> None:
    models = nets()
    plain = {name: {n: p.clone() for n, p in m.named_parameters()} for name, m in models.items()}
    (made,) = wrapped(models, [adam(models["a"].parameters(), plain=False)], nvme=tmp_path,
                      **WHERE[place])  # fmt: skip
    before = {tier: made.memory[tier].held_bytes for tier in (Tier.DEVICE, Tier.HOST)}
    made.sleep(host=host)
    for _ in range(2):  # they are still asleep after reading
        assert made.memory[Tier.DEVICE].held_bytes == 0
        assert not host or made.memory[Tier.HOST].held_bytes == 0
        for name, model in models.items():
            found = dict(overspill.named_weights(model))
            assert found.keys() == plain[name].keys()
            for each, value in found.items():
                assert torch.equal(value, plain[name][each]) and value.device.type == DEVICE.type
            assert all(map(torch.equal, model.state_dict().values(), plain[name].values()))
    made.wake()
    assert {tier: made.memory[tier].held_bytes for tier in before} == before
    made.close()


USES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "weights": lambda model, optimizer: model.last.weight.data.mul_(2).sum().item(),
    "written": lambda model, optimizer: nn.init.ones_(model.blocks[0][0].weight).sum().item(),
    "computed": lambda model, optimizer: (model.first.weight * 2).sum().item(),
    "loaded": lambda model, optimizer: bool(model.load_state_dict(Net(5).state_dict())),
    "materialized": lambda model, optimizer: materialized(model),
    "state": lambda model, optimizer: optimizer.state_dict()["state"][0]["exp_avg"].sum().item(),
    "state edited": lambda model, optimizer: edit(model, optimizer),
    "state loaded": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "gradient": lambda model, optimizer: model.last.weight.grad.sum().item(),
    "gradient written": lambda model, optimizer: model.last.weight.grad.mul_(3).sum().item(),
    "norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item(),
    "averaged": lambda model, optimizer: averaged(model, optimizer),
    "average": lambda model, optimizer: dict(optimizer.named_averages())["last.bias"].sum().item(),
    "commit": lambda model, optimizer: optimizer.commit(),
    "rollback": lambda model, optimizer: optimizer.rollback(),
    "slept again": lambda model, optimizer: optimizer.sleep(),
}  # fmt: skip


def materialized(model: nn.Module) -> None:
    with overspill.materialized(model, writeback=True), torch.no_grad():
        model.last.weight.mul_(0.5)


def edit(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model.last.weight]["exp_avg"].mul_(0.5)


def averaged(model: nn.Module, optimizer: Any) -> Any:
    with optimizer.averaged(), torch.no_grad():
        return model(normal(3, 2, WIDTH)).sum().item()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("use", USES)
def test_every_use_is_that_of_an_engine_awake(use: str, host: bool, tmp_path: Path) -> None:
    found = []
    for sleeps in (False, True):
        (folder := tmp_path / str(sleeps)).mkdir()
        model = Net(1)
        inner = overspill.ema(torch.optim.AdamW(model.parameters(), 0.01), 0.5)
        optimizer = overspill.wrap(
            model, inner, nvme=folder, rates=overspill.Rates(), **PLACES["device"]
        )
        for number in range(3):
            optimizer.zero_grad()
            model(normal(number, 4, WIDTH)).square().mean().backward()
            if number < 2:
                optimizer.step()
        if sleeps:
            optimizer.sleep(host=host)
        result = USES[use](model, optimizer)
        model(normal(7, 4, WIDTH)).square().mean().backward()
        optimizer.step()
        found.append((result, overspill.unwrap(model)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("end", ["close", "unwrap", "drop", "save"])
def test_an_end_asleep(end: str, host: bool, tmp_path: Path) -> None:
    (folder := tmp_path / "store").mkdir()
    model = Net(1)
    optimizer = overspill.wrap(
        model, torch.optim.AdamW(model.parameters(), 0.01), nvme=folder, commit_every=100,
        rates=overspill.Rates(), **PLACES["device"],
    )  # fmt: skip
    model(normal(1, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.sleep(host=host)
    if end == "save":
        optimizer.save(tmp_path / "out")
        assert (tmp_path / "out" / "optimizer.pt").is_file()
    if end == "unwrap":
        overspill.unwrap(model)
        assert all(map(torch.equal, model.state_dict().values(), expected.values()))
    elif end == "drop":
        del model, optimizer
    else:
        optimizer.close()
    again = Net(2)
    with overspill.resume(again, folder, device=CPU, rates=overspill.Rates())[0] as resumed:
        assert resumed.step_count == 1
        assert all(map(torch.equal, again.state_dict().values(), expected.values()))


_KILLED = """
import sys, torch, overspill
from tests.devices import normal
from tests.parity.nets import PLACES, WIDTH, Net
model = Net(1)
optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters(), 0.01), nvme=sys.argv[1],
                           commit_every=100, rates=overspill.Rates(), **PLACES["device"])
for number in range(3):
    model(normal(number, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.sleep(host=sys.argv[2] == "True")
print("asleep", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("host", [False, True])
def test_killed_asleep_nothing_is_lost(host: bool, tmp_path: Path) -> None:
    (folder := tmp_path / "store").mkdir()
    command = [sys.executable, "-c", _KILLED, str(folder), str(host)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "asleep\n"
        os.killpg(process.pid, signal.SIGKILL)
    (other := tmp_path / "other").mkdir()
    expected = Net(1)
    with overspill.wrap(
        expected, torch.optim.AdamW(expected.parameters(), 0.01), nvme=other,
        rates=overspill.Rates(), **PLACES["device"],
    ) as optimizer:  # fmt: skip
        for number in range(3):
            expected(normal(number, 4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        again = Net(2)
        with overspill.resume(again, folder, device=CPU, rates=overspill.Rates())[0] as resumed:
            assert resumed.step_count == 3
            same(again, expected)


# -- inference, and many times ---------------------------------------------------------------------


@pytest.mark.parametrize("host", [False, True])
def test_a_model_that_is_not_trained(host: bool, tmp_path: Path) -> None:
    model, plain = Net(3), Net(3)
    with overspill.wrap(model, nvme=tmp_path, rates=overspill.Rates(), **PLACES["device"]) as made:
        for number in range(3):
            with torch.no_grad():
                x = normal(number, 4, WIDTH)
                assert torch.equal(model(x), plain(x))
            made.sleep(host=host)
            assert made.memory[Tier.DEVICE].held_bytes == 0
        made.wake()


@about_cpu
def test_a_hundred_cycles(tmp_path: Path) -> None:
    """Host memory is returned to the system, and nothing grows."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    process = psutil.Process()
    optimizer = overspill.wrap(
        model, torch.optim.SGD(model.parameters(), 0.01), device=SIM, device_memory="16MiB",
        host_memory="80MiB", nvme=tmp_path, durable=False, rates=overspill.Rates(),
    )  # fmt: skip
    held = sum(optimizer.memory[tier].held_bytes for tier in (Tier.DEVICE, Tier.HOST))
    assert held > 56 * MIB
    awake, asleep, files = [], [], []
    for number in range(100):
        if number % 10 == 0:
            model(normal(number, 2, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        awake.append(process.memory_info().rss)
        optimizer.sleep(host=True)
        asleep.append(process.memory_info().rss)
        files.append(process.num_fds())
        optimizer.wake()
    free = [there - gone for there, gone in zip(awake, asleep, strict=True)]
    assert min(free) >= 0.99 * held, (free, held)
    # One or two tensors of a layer more or less stay in PyTorch's own allocator.
    assert max(asleep[50:]) <= max(asleep[:50]) + 8 * MIB, asleep
    assert len(set(files[1:])) == 1
    optimizer.close()


@pytest.mark.parametrize("place", WHERE)
def test_sleep_after_a_part_of_the_model_has_run(place: str, tmp_path: Path) -> None:
    """As ``generate`` of a peft model does: no forward of the whole model hides its weights."""
    found = []
    for sleeps in (False, True):
        (folder := tmp_path / str(sleeps)).mkdir()
        models = nets()
        made = wrapped(models, two(models, plain=False), nvme=folder, **WHERE[place])
        with torch.no_grad():
            models["a"].last(normal(0, 2, WIDTH))
        if sleeps:
            made[0].sleep()
            made[0].wake()
        found.append(steps(models, made, lambda _: None))
        overspill.unwrap(models)
    assert all(map(torch.equal, *found))
