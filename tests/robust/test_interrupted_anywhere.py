"""An exception at any line of the engine, as a signal handler raises it: what is resumed is a whole
step, and its count is right; and who goes on without resuming ends right too, or is told.

The exception is raised by a trace function, before the n-th line that the training thread runs in
the package; the lines are counted in a run before.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from overspill.grads.gradients import GradientCollector
from overspill.schedule.ledger import Ledger
from tests.devices import CPU, SIM, normal
from tests.models import TinyLM, adamw, batch, train

WIDTH, STEPS, FROM = 48, 6, 3
PACKAGE = str(Path(overspill.__file__).parent)

MODES: list[dict[str, Any]] = [
    {"update": "step", "commit_every": 2},
    {"update": "next_forward"},
    {"update": "next_forward", "commit_every": 3, "host_memory": "64MiB", "max_grad_norm": 1.0},
    {"update": "backward"},
    {"update": "backward", "commit_every": 3, "host_memory": "64MiB"},
    {"update": "next_forward", "device": SIM, "device_memory": "200KiB"},
]


class Interrupted(BaseException):
    """As ``KeyboardInterrupt``: no ``except Exception`` stops it."""


class Tripwire:
    """Raises before line number ``at`` of those that this thread runs in ``within``; counts.

    Not at the end of a ``with`` block, before its ``__exit__`` is called, and not before the first
    line of a ``finally``: the interpreter looks at signals after calls alone, so that no handler
    can raise there.
    """

    def __init__(self, at: int | None, within: str = PACKAGE) -> None:
        self.at, self.within, self.lines, self.where = at, within, 0, "not reached"
        self._last: dict[FrameType, int] = {}

    def __enter__(self) -> Tripwire:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()  # frames hold what they have looked at: graphs, slots

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        inside = frame.f_code.co_filename.startswith(self.within)
        return self._line if inside else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "return":
            self._last.pop(frame, None)
        if event != "line":
            return self._line
        before, self._last[frame] = self._last.get(frame, 0), frame.f_lineno
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if before > frame.f_lineno and text.lstrip().startswith("with "):
            return self._line
        if linecache.getline(frame.f_code.co_filename, frame.f_lineno - 1).strip() == "finally:":
            return self._line
        self.lines += 1
        if self.lines == self.at:
            sys.settrace(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise Interrupted
        return self._line


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
            for _ in range(3)
        ]
    )


def make(path: Path, mode: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"device": CPU, "host_memory": "200KiB", "rates": overspill.Rates(), **mode}
    return model, overspill.wrap(model, inner, nvme=path, **given)


def one_step(model: nn.Module, optimizer: Any, number: int) -> None:
    model(normal(number, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def reference(path: Path, mode: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """What the model holds after every step."""
    path.mkdir(parents=True)
    model, optimizer = make(path, mode)
    with optimizer:
        found = [state(model)]
        for number in range(STEPS):
            one_step(model, optimizer, number)
            found.append(state(model))
    return found


def interrupted(path: Path, mode: dict[str, Any], at: int | None) -> tuple[Any, Any, Tripwire]:
    """A run in which the exception comes at that line of the last steps."""
    path.mkdir()
    model, optimizer = make(path, mode)
    for number in range(FROM):
        one_step(model, optimizer, number)
    wire = Tripwire(at)
    try:
        with wire:
            for number in range(FROM, STEPS - 1):
                one_step(model, optimizer, number)
    except Interrupted:
        pass
    return model, optimizer, wire


def resumed(path: Path, mode: dict[str, Any], wanted: list[dict[str, torch.Tensor]]) -> None:
    again = build()
    options = {k: v for k, v in mode.items() if k != "nvme"}
    given = {"device": CPU, "host_memory": "200KiB", "rates": overspill.Rates(), **options}
    optimizer, _ = overspill.resume(again, path, **given)
    with optimizer:
        count = optimizer.step_count
        assert same(state(again), wanted[count]), f"resumed at step {count} with other values"
        for number in range(count, STEPS):
            one_step(again, optimizer, number)
        assert same(state(again), wanted[STEPS]), f"went on from step {count}, and ended elsewhere"


def positions(total: int, few: int) -> list[int]:
    """So many lines, spread over all, each time the same ones."""
    if few >= total:
        return list(range(1, total + 1))
    return sorted({1 + round(n * (total - 1) / (few - 1)) for n in range(few)})


def play_resume(folder: Path, number: int, few: int) -> None:
    mode = MODES[number]
    wanted = reference(folder / "whole", mode)
    model, optimizer, wire = interrupted(folder / "count", mode, None)
    optimizer.close()
    least = FROM - FROM % mode.get("commit_every", 1)
    for at in positions(wire.lines, few):
        path = folder / str(at)
        model, optimizer, wire = interrupted(path, mode, at)
        where = f"line {at}: {wire.where}"
        try:
            optimizer.close()
            del model
            resumed(path, mode, wanted)
        except BaseException as error:
            raise AssertionError(where) from error
        assert least <= STEPS, where
    assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill")]


def play_on(folder: Path, number: int, few: int) -> int:
    """Goes on in the same process.  Returns how often it was told that it cannot."""
    mode = MODES[number]
    wanted = reference(folder / "whole", mode)
    _, optimizer, wire = interrupted(folder / "count", mode, None)
    optimizer.close()
    told = 0
    for at in positions(wire.lines, few):
        model, optimizer, wire = interrupted(folder / str(at), mode, at)
        where = f"line {at}: {wire.where}"
        try:
            with optimizer:
                count = optimizer.step_count
                try:
                    optimizer.zero_grad()
                    restore_statistics(model, wanted[count])
                    for step in range(count, STEPS):
                        one_step(model, optimizer, step)
                except OffloadError as error:
                    told += 1
                    assert mode["update"] == "backward" and "rollback()" in str(error), error
                    optimizer.rollback()
                    count = optimizer.step_count
                    assert same(state(model), wanted[count])
                    for step in range(count, STEPS):
                        one_step(model, optimizer, step)
                assert same(state(model), wanted[STEPS])
        except BaseException as error:
            raise AssertionError(where) from error
    return told


def look(model: nn.Module, optimizer: Any, mode: dict[str, Any]) -> list[Any]:
    """Reads all that can be read between a backward and its step."""
    kept = [p.grad for p in model.parameters() if mode["update"] != "backward"]
    gradients = [grad.norm().item() for grad in kept if grad is not None]
    sums = [(p.sum().item(), p.data.clone()) for p in model.parameters()]
    return [gradients, sums, state(model), optimizer.state_dict()["state"]]


def play_reads(folder: Path, number: int, few: int) -> None:
    """Whoever looks is interrupted, again and again, in one and the same run: he sees the same the
    next time, nothing keeps room, and training goes on as if nobody had looked."""
    mode = MODES[number]
    wanted = reference(folder / "whole", mode)
    (folder / "looked").mkdir()
    model, optimizer = make(folder / "looked", mode)
    with optimizer:
        for step in range(FROM):
            one_step(model, optimizer, step)
        model(normal(FROM, 4, WIDTH)).square().mean().backward()
        seen = look(model, optimizer, mode)
        with Tripwire(None) as count:
            look(model, optimizer, mode)
        for at in positions(count.lines, few):
            wire = Tripwire(at)
            try:
                with wire:
                    look(model, optimizer, mode)
            except Interrupted:
                pass
            try:
                torch.testing.assert_close(look(model, optimizer, mode), seen, rtol=0, atol=0)
            except BaseException as error:
                raise AssertionError(f"line {at}: {wire.where}") from error
        optimizer.step()
        optimizer.zero_grad()
        for step in range(FROM + 1, STEPS):
            one_step(model, optimizer, step)
        assert same(state(model), wanted[STEPS])


def restore_statistics(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """A forward that was interrupted has moved them: the loop's own affair."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(wanted[name])


@pytest.mark.parametrize("number", range(len(MODES)))
def test_what_is_resumed_is_a_whole_step(tmp_path: Path, number: int) -> None:
    play_resume(tmp_path, number, 4)


@pytest.mark.parametrize("number", range(len(MODES)))
def test_who_goes_on_ends_right_or_is_told(tmp_path: Path, number: int) -> None:
    play_on(tmp_path, number, 4)


@pytest.mark.parametrize("number", range(len(MODES)))
def test_whoever_looks_may_be_interrupted(tmp_path: Path, number: int) -> None:
    play_reads(tmp_path, number, 25)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(len(MODES)))
def test_every_line(tmp_path: Path, number: int) -> None:
    play_resume(tmp_path / "resume", number, 10**9)
    play_on(tmp_path / "on", number, 10**9)
    play_reads(tmp_path / "reads", number, 10**9)


def test_between_two_lines_of_an_early_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What backward was about to update is refused or taken, and training goes on."""
    torch.manual_seed(0)
    model = TinyLM(depth=8)
    announce, calls = Ledger._announce, itertools.count(1)

    def interrupted(ledger: Ledger, *args: Any) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        announce(ledger, *args)

    with overspill.wrap(
        model, adamw(model), device=CPU, update="backward", host_memory="64MiB"
    ) as optimizer:
        monkeypatch.setattr(Ledger, "_announce", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(*batch(0)).backward()
        monkeypatch.undo()
        for _ in range(3):  # the torn gradient, twice, and what was updated and then dropped
            with pytest.raises(OffloadError):
                optimizer.step()
            with contextlib.suppress(OffloadError):  # which says once that they were applied
                optimizer.zero_grad()
        optimizer.step()
        train(model, optimizer, 2)


def test_before_a_gradient_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had come before is a gradient still, with its norm."""
    torch.manual_seed(0)
    model = TinyLM(depth=8)
    pending = GradientCollector._pending_of
    with overspill.wrap(
        model, adamw(model), device=SIM, accumulate=2, host_memory="64MiB",
        device_memory="900KiB", activations="keep",
    ) as optimizer:  # fmt: skip
        model(*batch(0)).backward()

        def interrupted(collector: GradientCollector, unit: int) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(GradientCollector, "_pending_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(*batch(1)).backward()
        monkeypatch.setattr(GradientCollector, "_pending_of", pending)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 2, micro_steps=2)
