"""An exception while a unit is shown, let go, given away or taken back: nobody sees another's
weights, and what was begun can be done again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.schedule.messages import Freed
from overspill.training.residences import Residences
from tests.devices import CPU, SIM, normal
from tests.robust.test_interrupted_anywhere import Interrupted, Tripwire, same, state

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
@pytest.mark.parametrize("at", ["_to_views", "_note_edits", "_residence", "_hide"])
def test_a_unit_that_is_half_shown_or_half_hidden(
    at: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are read, so that slots go round; what is then read and edited is the unit's own."""
    model, optimizer = wrapped(tmp_path, place)
    real: Callable[..., Any] = getattr(Residences, at)

    def interrupted(self: Residences, unit: int) -> Any:
        if unit != 1:
            return real(self, unit)
        monkeypatch.undo()
        if at == "_to_views":
            real(self, unit)
        raise KeyboardInterrupt

    with optimizer, torch.no_grad():
        expected, params = state(model), dict(model.named_parameters())
        monkeypatch.setattr(Residences, at, interrupted)
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
        executor = optimizer._engine.executor
        put = executor._queue.put

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

        real = executor._queue
        monkeypatch.setattr(executor, "_queue", Queue())
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, WIDTH))
        monkeypatch.undo()
        for _ in range(2):
            model(torch.ones(4, WIDTH))
        optimizer.commit()
        weights = executor._machine.weights
        assert not any(item.kept for item in weights.units)
