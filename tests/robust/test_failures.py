"""A failure in the background surfaces once, with its cause; then the engine only closes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.errors import IoError, OffloadError
from overspill.movement.updates import Updater
from overspill.schedule.messages import Await, GradRoom, Need, Step
from tests.devices import CPU, SIM
from tests.models import TinyLM, adamw, batch, train

UPDATES = ["step", "backward", "next_forward"]


def wrapped(folder: Path, update: str, device: str) -> tuple[TinyLM, Any]:
    torch.manual_seed(0)
    model = TinyLM(width=128, depth=6)
    more = {"device_memory": "2MiB"} if device == SIM else {}
    optimizer = overspill.wrap(
        model, adamw(model), device=device, update=update, nvme=folder, host_memory="4MiB", **more
    )
    return model, optimizer


def fails_once(model: TinyLM, optimizer: Any, error: type[OffloadError]) -> OffloadError:
    """Trains until it fails; every later use says so without the cause; closing leaves nothing."""
    with pytest.raises(error) as caught:
        train(model, optimizer, 20)
    later: list[Callable[[], object]] = [
        lambda: model(*batch(0)), optimizer.step, model.state_dict, optimizer.state_dict,
    ]  # fmt: skip
    for use in later:
        with pytest.raises(OffloadError, match="stopped after an earlier error"):
            use()
    optimizer.close()
    optimizer.close()
    for tier in (overspill.Tier.DEVICE, overspill.Tier.HOST):
        assert optimizer.memory[tier].held_bytes == 0, tier
    assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill")]
    return caught.value


def is_store(fd: Path, folder: Path) -> bool:
    """Whether this file descriptor is a large file in ``folder``, named or not."""
    try:
        return str(folder) in str(fd.readlink()) and fd.stat().st_size > 2**20
    except OSError:
        return False


@pytest.mark.parametrize("device", [CPU, SIM])
@pytest.mark.parametrize("update", UPDATES)
def test_a_store_that_lost_its_data(update: str, device: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, update, device)
    train(model, optimizer, 2)
    stores = [fd for fd in Path("/proc/self/fd").iterdir() if is_store(fd, tmp_path)]
    assert stores
    for fd in stores:
        with fd.open("r+b") as file:
            file.truncate(4096)
    error = fails_once(model, optimizer, IoError)
    assert str(tmp_path) in str(error)


@pytest.mark.parametrize("device", [CPU, SIM])
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_that_fails(
    update: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(tmp_path, update, device)
    train(model, optimizer, 1)
    inner, left = Updater._update, [40]

    def failing(self: Updater, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ArithmeticError("no such kernel")
        inner(self, *args)

    monkeypatch.setattr(Updater, "_update", failing)
    error = fails_once(model, optimizer, OffloadError)
    assert isinstance(error.__cause__, ArithmeticError) and "no such kernel" in str(error)


def test_a_failure_at_the_end_of_a_backward_that_updates(tmp_path: Path) -> None:
    """``zero_grad`` names the failure, not the step that has therefore not ended."""
    model, optimizer = wrapped(tmp_path, "backward", CPU)
    model(*batch(0)).backward()
    optimizer._engine.runtime.executor.health.fail(ArithmeticError("no such kernel"))
    with pytest.raises(OffloadError, match="no such kernel"):
        optimizer.zero_grad()
    optimizer.close()


def within(seconds: float, call: Callable[[], None]) -> None:
    """Runs ``call`` in a thread of its own, which must end in time; raises what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    if raised:
        raise raised[0]


@pytest.mark.parametrize("device", [CPU, SIM])
@pytest.mark.parametrize("update", UPDATES)
def test_a_machine_that_fails_wakes_whoever_waits(
    update: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises before it has taken a signal, or after, when nothing that it said is carried
    out: of the one that waits it then knows nothing, or it has forgotten him."""
    rng = random.Random(f"{update} {device}")
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        model, optimizer = wrapped(folder, update, device)
        train(model, optimizer, 1)
        machine = optimizer._engine.runtime.executor._machine
        inner, asks = machine.handle, (Need, GradRoom, Await, Step)
        kinds, left = (asks, rng.randint(1, 6)) if number % 2 else ((object,), rng.randint(1, 200))

        def failing(
            signal: Any, inner: Any = inner, kinds: Any = kinds, left: list[int] = [left],  # noqa: B006
            late: bool = number < 3,
        ) -> Any:  # fmt: skip
            left[0] -= isinstance(signal, kinds)
            if left[0] == 0 and not late:
                raise AssertionError("a decision that cannot be")
            instructions = inner(signal)
            if left[0] <= 0 and instructions:
                raise AssertionError("a decision that cannot be")
            return instructions

        with monkeypatch.context() as patched:
            patched.setattr(machine, "handle", failing)
            error: list[OffloadError] = []
            within(
                60, lambda m=model, o=optimizer, e=error: e.append(fails_once(m, o, OffloadError))
            )
        assert "a decision that cannot be" in str(error[0])


@pytest.mark.parametrize("update", UPDATES)
def test_a_step_that_the_user_drops(update: str, tmp_path: Path) -> None:
    """Code of the user's raises in forward, in backward and between; later steps go on."""
    model, optimizer = wrapped(tmp_path, update, CPU)

    def refuse(*_: Any) -> None:
        raise KeyError("the user's own")

    handle = model.blocks[3].register_forward_hook(refuse)
    with pytest.raises(KeyError):
        model(*batch(0))
    handle.remove()
    loss = model(*batch(0))
    del loss
    loss = model(*batch(0))
    if update != "backward":  # there half of a step has then been taken, and cannot be taken back
        handle = model.blocks[2].register_full_backward_hook(refuse)
        loss = model(*batch(0))
        with pytest.raises(KeyError):
            loss.backward()
        handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 3)
    assert optimizer.step_count == 3
    optimizer.close()
