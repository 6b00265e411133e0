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


def wrapped(path: Path, place: str) -> tuple[nn.Module, Any]:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, overspill.wrap(model, inner, nvme=path, rates=overspill.Rates(), **TIGHT[place])


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
    trip._last.clear()  # frames hold what they have looked at
    return trip.lines


def looked_at(model: nn.Module, optimizer: Any, at: int | None) -> int:
    with Tripwire(at) as trip, contextlib.suppress(Interrupted), overspill.materialized(model):
        pass
    trip._last.clear()
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
