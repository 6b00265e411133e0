"""An exception while a unit is shown, let go, given away or taken back: nobody sees another's
weights, and what was begun can be done again."""

from __future__ import annotations

import contextlib
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
from overspill.params.edit_watch import EditWatch
from overspill.params.onloaded_units import OnloadedUnits
from overspill.schedule.messages import Freed
from tests.devices import CPU, SIM, normal
from tests.robust.test_interrupted_anywhere import PACKAGE, Interrupted, Tripwire, same, state

WIDTH = 32
TIGHT: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "16KiB", "host_memory": "4MiB"}
}
if CPU == "cpu":
    TIGHT["cpu"] = {"device": CPU, "host_memory": "64KiB"}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(5)))


def wrapped(path: Path, place: str, **more: Any) -> tuple[nn.Module, Any]:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, overspill.wrap(
        model, inner, nvme=path, rates=overspill.Rates(), **{**TIGHT[place], **more}
    )


@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize(
    ("of", "at"),
    [
        (OnloadedUnits, "resume"),
        (EditWatch, "look_while_shown"),
        (OnloadedUnits, "_onloaded_unit"),
        (OnloadedUnits, "_hide"),
    ],
)
def test_a_unit_that_is_half_shown_or_half_hidden(
    of: type, at: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are read, so that slots go round; what is then read and edited is the unit's own."""
    real: Callable[..., Any] = getattr(of, at)
    model, optimizer = wrapped(tmp_path, place)

    def interrupted(self: OnloadedUnits | EditWatch, unit: int, *rest: Any) -> Any:
        if unit != 1:
            return real(self, unit, *rest)
        monkeypatch.undo()
        if at == "resume":
            real(self, unit)
        raise KeyboardInterrupt

    with optimizer, torch.no_grad():
        expected, params = state(model), dict(model.named_parameters())
        monkeypatch.setattr(of, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, WIDTH))
        for number in (4, 3, 2):
            params[f"{number}.0.weight"].sum()
        assert torch.equal(params["1.0.weight"], expected["1.0.weight"])
        params["1.0.weight"].add_(1)
        expected["1.0.weight"] += 1
        assert same(expected, state(model))
        optimizer.commit()
    fresh = build()
    again, _ = overspill.resume(fresh, tmp_path, device=CPU, rates=overspill.Rates())
    with again:
        assert same(expected, state(fresh))


def given_away(model: nn.Module, optimizer: Any, at: int | None) -> int:
    with Tripwire(at) as trip, contextlib.suppress(Interrupted):
        overspill.unwrap(model)
    return trip.lines


def looked_at(model: nn.Module, optimizer: Any, at: int | None) -> int:
    with Tripwire(at) as trip, contextlib.suppress(Interrupted), overspill.materialized(model):
        pass
    return trip.lines


@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize("what", [given_away, looked_at])
def test_what_was_interrupted_is_done_again(
    what: Callable[..., int], place: str, tmp_path: Path
) -> None:
    """``unwrap``, or ``materialized`` and then ``unwrap``: at the end an ordinary model."""
    (tmp_path / "count").mkdir()
    model, optimizer = wrapped(tmp_path / "count", place)
    with optimizer:
        expected = state(model)
        lines = what(model, optimizer, None)
    for at in range(1, lines + 1, max(1, lines // 25)):
        folder = tmp_path / str(at)
        folder.mkdir()
        model, optimizer = wrapped(folder, place)
        what(model, optimizer, at)
        if "_overspill_engine" in model.__dict__:
            overspill.unwrap(model)
        assert all(type(p) is nn.Parameter for p in model.parameters()), at
        assert same(expected, state(model)), at
        model(normal(0, 4, WIDTH)).sum().backward()
        optimizer.close()
        assert not [t for t in threading.enumerate() if "overspill" in t.name], at


def test_a_block_that_is_interrupted_at_any_line_of_its_own_ends(tmp_path: Path) -> None:
    """``materialized`` and ``averaged``: what comes next finds weights."""
    of = [(f"{PACKAGE}/state/materializing.py", overspill.materialized)]
    of += [(f"{PACKAGE}/state/averages.py", lambda _: optimizer.averaged())]
    model = build()[:2]
    inner = overspill.ema(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    given = {**TIGHT["device"], "rates": overspill.Rates()}
    with overspill.wrap(model, inner, nvme=tmp_path, **given) as optimizer:
        model(normal(0, 4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = state(model)
        for within, block in of:
            at, reached = 0, True
            while reached:
                at += 1
                with Tripwire(at, within) as trip, contextlib.suppress(Interrupted), block(model):
                    pass
                reached = trip.where != "not reached"
                optimizer.commit()
                assert same(expected, state(model)), trip.where
            assert at > 20


@pytest.mark.parametrize("place", TIGHT)
def test_a_close_that_is_interrupted_ends_all(place: str, tmp_path: Path) -> None:
    """Its last step is committed, its threads end, its directory is free: by the first call where
    that had begun, else by the second."""
    at, reached = 0, True
    while reached:
        at += 5
        folder = tmp_path / str(at)
        folder.mkdir()
        model, optimizer = wrapped(folder, place, durable=True)
        model(normal(0, 4, WIDTH)).sum().backward()
        optimizer.step()
        expected = state(model)
        with Tripwire(at) as trip, contextlib.suppress(Interrupted):
            optimizer.close()
        reached = trip.where != "not reached"
        optimizer.close()
        assert not [t for t in threading.enumerate() if "overspill" in t.name], trip.where
        if at % 3 == 0:
            fresh = build()
            with overspill.resume(fresh, folder, device=CPU, rates=overspill.Rates())[0] as again:
                assert again.step_count == 1
                assert same(expected, state(fresh))
    assert at > 10


@pytest.mark.parametrize("place", TIGHT)
def test_a_use_that_is_interrupted_at_any_line_keeps_no_slot(place: str, tmp_path: Path) -> None:
    """Room is for two units: a slot that was lost would be missed at once."""
    model, optimizer = wrapped(tmp_path, place)
    with optimizer, torch.no_grad():
        expected, at, reached = state(model), 0, True
        while reached:
            at += 1
            with Tripwire(at) as trip, contextlib.suppress(Interrupted):
                model[1](torch.ones(4, WIDTH))
            reached = trip.where != "not reached"
            for number in (3, 0, 1, 4, 2):
                model[number](torch.ones(4, WIDTH))
        assert at > 100
        assert same(expected, state(model))


def test_closing_amid_materialized_leaves_ordinary_weights() -> None:
    model = build()
    optimizer = overspill.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), device=CPU)
    expected = state(model)
    with overspill.materialized(model):
        optimizer.close()
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_a_slot_that_is_let_go_is_told_of_though_the_telling_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(tmp_path, "device", device_memory="32KiB")
    kept: list[torch.Tensor] = []
    with optimizer, torch.no_grad():
        hook = model[1][0].register_forward_hook(
            lambda m, *_: kept.append(m.weight.detach()), prepend=True
        )
        model(torch.ones(4, WIDTH))
        hook.remove()
        kept.clear()
        executor = optimizer._engine.runtime.executor
        put = executor.engine_port.queue.put

        class Queue:
            def __init__(self) -> None:
                self.left = 1

            def put(self, told: Any) -> None:
                if isinstance(told, Freed) and self.left:
                    self.left = 0
                    raise KeyboardInterrupt
                put(told)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        real = executor.engine_port.queue
        monkeypatch.setattr(executor.engine_port, "queue", Queue())
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, WIDTH))
        monkeypatch.undo()
        for _ in range(2):
            model(torch.ones(4, WIDTH))
        optimizer.commit()
        weights = executor._machine.weights
        assert not any(item.kept for item in weights.units)


MODES_OF_TORCH = ("autograd/grad_mode.py", "amp/autocast_mode.py")


def used_in_all_ways(model: nn.Module, optimizer: Any) -> None:
    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(normal(0, 4, WIDTH)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    model.load_state_dict(model.state_dict())
    param = next(iter(model.parameters()))
    nn.init.zeros_(param)
    param.data.add_(1)
    with overspill.materialized(model, writeback=True):
        param.data.add_(1)


def test_no_mode_of_torch_is_left_behind(tmp_path: Path) -> None:
    """A signal handler that raises while torch switches a mode for the engine: the thread has the
    mode of before.  (Not what torch's own functions switch for themselves.)"""
    at, reached, seen = 0, True, 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        name, caller = frame.f_code.co_filename, frame.f_back
        if not name.endswith(MODES_OF_TORCH):
            return None
        while caller is not None and caller.f_code.co_filename.endswith(MODES_OF_TORCH):
            caller = caller.f_back
        assert caller is not None
        return in_a_mode if caller.f_code.co_filename.startswith(PACKAGE) else None

    def in_a_mode(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen, reached
        if event in ("line", "return"):
            seen += 1
            if seen == at:
                reached = True
                sys.settrace(None)
                raise Interrupted
        return in_a_mode

    while reached:
        at, reached, seen = at + 1, False, 0
        (tmp_path / str(at)).mkdir()
        model, optimizer = wrapped(tmp_path / str(at), "device")
        with optimizer:
            sys.settrace(traced)
            try:
                with contextlib.suppress(Interrupted):
                    used_in_all_ways(model, optimizer)
            finally:
                sys.settrace(None)
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), at
            assert not torch.is_autocast_enabled("cpu"), at
        assert reached or seen == at - 1
    assert at > 5


@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize("then", ["forward", "state_dict", "close"])
def test_edits_of_a_block_that_was_interrupted_are_dropped(
    then: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is used next sees the weights, and the last step is kept."""
    model, optimizer = wrapped(tmp_path, place)
    model(normal(0, 4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = state(model)
    with torch.no_grad():
        loss = model(normal(1, 4, WIDTH)).sum().item()
    onloaded_units = type(optimizer._engine._onloaded_units)
    real = onloaded_units.take_back

    def interrupted(*given: Any) -> None:
        monkeypatch.setattr(onloaded_units, "take_back", real)
        raise KeyboardInterrupt

    kept: list[BaseException] = []  # as a notebook keeps the last one
    try:
        with overspill.materialized(model):
            for p in model.parameters():
                p.data.fill_(3.0)
            monkeypatch.setattr(onloaded_units, "take_back", interrupted)
    except KeyboardInterrupt as error:
        kept.append(error)
    assert kept
    if then == "forward":
        with torch.no_grad():
            assert model(normal(1, 4, WIDTH)).sum().item() == loss
    if then != "close":
        assert same(expected, state(model))
    optimizer.close()
    kept.clear()
    again = build()
    optimizer, _ = overspill.resume(
        again, tmp_path, torch.optim.SGD(again.parameters(), lr=0.1), **TIGHT[place]
    )
    with optimizer:
        assert optimizer.step_count == 1 and same(expected, state(again))


def test_what_is_declared_ends_with_its_block(tmp_path: Path) -> None:
    """However it ends, and whether or not anybody keeps the exception."""
    _, optimizer = wrapped(tmp_path, next(iter(TIGHT)), update="backward", accumulate=2)
    early = optimizer._engine._loop._backward_updates
    with optimizer:
        assert not early._final()
        declared = optimizer.accumulate(final=True)
        assert not early._final(), "it has not begun"
        try:
            with declared:
                assert early._final()
                with optimizer.accumulate(final=False):
                    assert not early._final()
                    raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            kept = error
        assert not early._final() and kept.__traceback__ is not None
        with optimizer.accumulate(final=True):
            assert early._final()
        assert len(early._declared) <= 3, "those that ended are forgotten"


@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("apart", [67, pytest.param(23, marks=pytest.mark.soak)])
def test_a_sleep_that_is_interrupted_loses_nothing(
    apart: int, host: bool, place: str, tmp_path: Path
) -> None:
    """Nor a ``wake``: what comes next finds the weights, the gradients and the state."""
    model, optimizer = wrapped(tmp_path, place, durable=False)
    other, plain = wrapped(tmp_path, place, durable=False)

    def sleep() -> None:
        optimizer.sleep(host=host)

    def forward() -> None:
        with torch.no_grad():
            model(normal(0, 2, WIDTH))

    def train(of: nn.Module, by: Any, number: int) -> None:
        by.zero_grad()
        of(normal(number, 4, WIDTH)).square().sum().backward()

    with optimizer, plain:
        for what in (sleep, optimizer.wake, forward):
            at, where = 0, ""
            while where != "not reached":
                at += apart
                train(model, optimizer, at)
                train(other, plain, at)
                if what is not sleep:
                    sleep()
                with Tripwire(at) as trip, contextlib.suppress(Interrupted):
                    what()
                where = trip.where
                if at % 2:
                    assert torch.equal(model[3][0].weight.data, other[3][0].weight.data), where
                elif at % 3:
                    optimizer.wake()
                for p, q in zip(model.parameters(), other.parameters(), strict=True):
                    assert torch.equal(p.grad, q.grad), where
                optimizer.step()
                plain.step()
                assert same(state(model), state(other)), where
            assert at > (20 if place == "device" or host else 0)
