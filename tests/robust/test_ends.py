"""Ways in which a run ends, at every place of a step: users see what ended it, and the store holds
the last step that was taken."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, about_forks, normal, plainly

WIDTH, AT = 64, 2  # the step in which it ends, counted from 0
PLACES = [
    "forward", "between units", "backward", "before the step", "after the step", "between steps",
]  # fmt: skip
TAKEN = {place: AT + (place in ("after the step", "between steps")) for place in PLACES}
MEMORY: dict[str, dict[str, Any]] = {
    # No room ahead: an update that is pending needs the room of the unit that was interrupted.
    "tight": {"device": CPU, "host_memory": "310KiB", "prefetch_depth": 0},
    "roomy": {"device": CPU, "host_memory": "4MiB"},
    "device": {"device": SIM, "device_memory": "140KiB", "host_memory": "1MiB"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.between(self.first(x)))


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))).to(DEVICE)


def _expected(steps: int) -> dict[str, torch.Tensor]:
    model = _build()
    optimizer = plainly(overspill.optim.AdamW, model.parameters(), lr=0.01)
    for number in range(steps):
        _step(model, optimizer, number, "", lambda: None)
    return {name: value.clone() for name, value in model.state_dict().items()}


def _step(model: Any, optimizer: Any, number: int, place: str, end: Callable[[], None]) -> None:
    """Take one step, and call ``end`` at a place of it."""
    if place in ("forward", "between units"):
        module = model[2].between if place == "forward" else model[2]
        module.register_forward_pre_hook(lambda *_: end())
    x = normal(number, 2, WIDTH).requires_grad_()
    if place == "backward":
        model[1].between.register_full_backward_hook(lambda *_: end())
    model(x).square().sum().backward()
    if place == "before the step":
        optimizer.register_step_pre_hook(lambda *_: end())
    if place == "after the step":
        optimizer.register_step_post_hook(lambda *_: end())
    optimizer.step()
    optimizer.zero_grad()
    if place == "between steps":
        end()


def _train(folder: Path, update: Any, memory: str, place: str, end: Callable[[], None]) -> Any:
    model = _build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {**MEMORY[memory], "update": update, "activations": "keep"}
    optimizer = overspill.wrap(model, inner, nvme=folder, **options)
    with optimizer:
        for number in range(AT + 2):
            _step(model, optimizer, number, place if number == AT else "", end)
    return model


def _committed(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step of the last commit, and the weights in it."""
    model = _build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer, _ = overspill.resume(model, folder, inner, device=CPU, host_memory="4MiB")
    with optimizer:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return optimizer.step_count, weights


def _check(folder: Path, steps: range) -> None:
    step, weights = _committed(folder)
    assert step in steps
    for name, value in _expected(step).items():
        assert torch.equal(weights[name], value), name


class Stop(Exception):
    """What a user's own code raises."""


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_an_exception_is_what_the_user_sees_and_the_last_step_is_committed(
    update: str, memory: str, place: str, kind: type[BaseException], tmp_path: Path
) -> None:
    def end() -> None:
        raise kind("enough")

    with pytest.raises(kind, match="enough"):
        _train(tmp_path, update, memory, place, end)
    gc.collect()
    _check(tmp_path, range(TAKEN[place], TAKEN[place] + 1))


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_updates_in_backward_leave_a_whole_step(
    place: str, kind: type[BaseException], tmp_path: Path
) -> None:
    """Where backward has begun to update, the commit before is kept."""

    def end() -> None:
        raise kind("enough")

    with pytest.raises(kind, match="enough"):
        _train(tmp_path, "backward", "roomy", place, end)
    gc.collect()
    _check(tmp_path, range(TAKEN[place], TAKEN[place] + 1))


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_collected_is_committed(place: str, tmp_path: Path) -> None:
    """The loop ends by an exception that is dropped, and nobody closes anything."""

    def run() -> None:
        model = _build()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = overspill.wrap(model, inner, nvme=tmp_path, **MEMORY["tight"])

        def end() -> None:
            raise Stop

        for number in range(AT + 2):
            _step(model, optimizer, number, place if number == AT else "", end)

    try:
        run()
    except Stop as stop:
        traceback.clear_frames(stop.__traceback__)
    gc.collect()
    _check(tmp_path, range(TAKEN[place], TAKEN[place] + 1))


def test_an_error_of_close_does_not_replace_that_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    broken = False

    def extra() -> dict[str, Any]:
        if broken:
            raise ValueError("not now")
        return {}

    optimizer = overspill.wrap(model, inner, nvme=tmp_path, extra=extra, **MEMORY["roomy"])
    with pytest.raises(Stop), optimizer:
        _step(model, optimizer, 0, "", lambda: None)
        broken = True
        raise Stop
    assert "after Stop, close() failed: not now" in caplog.text
    other = _build()
    inner = torch.optim.AdamW(other.parameters(), lr=0.01)
    broken = False
    mine = overspill.wrap(other, inner, device=CPU, nvme=_new(tmp_path), extra=extra)
    with pytest.raises(ValueError, match="not now"), mine:  # where nothing else is raised, it is
        _step(other, mine, 0, "", lambda: None)
        broken = True


def _new(folder: Path) -> Path:
    made = folder / "new"
    made.mkdir()
    return made


@pytest.mark.parametrize("block", ["materialized", "averaged"])
def test_an_error_at_the_end_of_a_block_does_not_replace_that_in_it(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _build()
    inner = overspill.ema(torch.optim.AdamW(model.parameters(), lr=0.01), 0.9)
    with overspill.wrap(model, inner, nvme=tmp_path, **MEMORY["roomy"]) as optimizer:
        _step(model, optimizer, 0, "", lambda: None)
        made = overspill.materialized(model) if block == "materialized" else optimizer.averaged()
        owner = made._materializing if block == "materialized" else made._averages
        ended = owner.end

        def end() -> Any:
            ended()
            raise RuntimeError("at the end")

        monkeypatch.setattr(owner, "end", end)
        with pytest.raises(Stop), made:
            raise Stop
        monkeypatch.undo()
        _step(model, optimizer, 1, "", lambda: None)


def _by_signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ENDS: dict[str, tuple[Callable[[], None], int]] = {  # with the exit status of the process
    "SIGINT": (_by_signal(signal.SIGINT), 130),
    "SIGTERM": (_by_signal(signal.SIGTERM), -signal.SIGTERM),
    "SIGKILL": (_by_signal(signal.SIGKILL), -signal.SIGKILL),
    "sys.exit": (lambda: sys.exit(7), 7),
    "os._exit": (lambda: os._exit(9), 9),
    "uncaught": (lambda: (_ for _ in ()).throw(Stop), 1),
}


def _child(folder: Path, memory: str, place: str, end: Callable[[], None]) -> None:
    """A script that ends: its exit status is what Python's own would be."""
    status = 0
    try:
        _train(folder, "next_forward", memory, place, end)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as left:
        status = int(left.code or 0)
    except BaseException:
        status = 1
    os._exit(status)


@about_forks
@pytest.mark.parametrize("memory", ["tight", "roomy"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ENDS)
def test_a_process_that_ends_leaves_a_whole_commit(
    way: str, place: str, memory: str, tmp_path: Path
) -> None:
    end, status = ENDS[way]
    child = os.fork()
    if child == 0:
        _child(tmp_path, memory, place, end)
    _, found = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(found) == status
    taken = TAKEN[place]
    closed = way in ("SIGINT", "sys.exit", "uncaught")
    # A step ends when the commit of the one before is durable: with "next_forward" maybe after
    # step(), at the latest in the next step(). So two are lost at most, however slow the disk is.
    _check(tmp_path, range(taken if closed else max(0, taken - 2), taken + 1))
