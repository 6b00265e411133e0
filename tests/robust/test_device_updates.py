"""Records that visit the device for their update: what fails on the way, and what ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import overspill
from overspill.blueprints import make_blueprint
from overspill.errors import OffloadError
from overspill.facts.trace import Trace
from overspill.movement.accelerators.base import CopyDone
from overspill.movement.accelerators.sim import SimAccelerator
from overspill.movement.compute_use import RangeEvents
from overspill.movement.device_updates import DeviceUpdates, RecordParts
from overspill.movement.pools import Arenas
from overspill.movement.updates import Updater
from overspill.planning.plan import Preference
from overspill.schedule.arena import Place
from overspill.schedule.messages import Update
from tests.devices import SIM, about_sim
from tests.models import TinyLM, adamw, train
from tests.robust.test_failures import fails_once


@contextmanager
def visiting(disturb: Callable[[str, int], None] | None = None) -> Iterator[tuple[TinyLM, Any]]:
    """A wrapped model all of whose state visits a device whose copies ``disturb`` may break."""
    torch.manual_seed(0)
    model = TinyLM(width=128, depth=6)
    choose = partial(make_blueprint, prefer=Preference(visiting=1.0))
    with (
        mock.patch("overspill.wrapping.make_blueprint", choose),
        mock.patch(
            "overspill.wrapping.make_accelerator",
            lambda device, rates: SimAccelerator(rates, disturb=disturb),
        ),
    ):
        optimizer = overspill.wrap(
            model, adamw(model), device=SIM, device_memory="8MiB", host_memory="64MiB",
            activations="keep",
            update="step",
        )  # fmt: skip
        assert optimizer.plan.detail.device_update_share == 1
        yield model, optimizer
        optimizer.close()


@about_sim
@pytest.mark.parametrize("lane", ["copy_in", "copy_out"])
@pytest.mark.parametrize("number", [1, 2, 3, 10])
def test_a_copy_that_fails(lane: str, number: int) -> None:
    """It surfaces once, with its cause; after it the engine only closes, and memory is freed."""
    begun: list[str] = []
    armed = [False]

    def disturb(copied: str, nbytes: int) -> None:
        if armed[0] and copied == lane:
            begun.append(copied)
            if len(begun) == number:
                raise ArithmeticError("the link broke")

    with visiting(disturb) as (model, optimizer):
        train(model, optimizer, 1)
        armed[0] = True
        error = fails_once(model, optimizer, OffloadError)
        assert isinstance(error.__cause__, ArithmeticError) and "link broke" in str(error)


@about_sim
def test_an_update_that_fails_there() -> None:
    with visiting() as (model, optimizer):
        train(model, optimizer, 1)

        def failing(self: Updater, task: Update) -> None:
            assert task.visit is not None
            raise ArithmeticError("no such kernel")

        with mock.patch.object(Updater, "_update", failing):
            error = fails_once(model, optimizer, OffloadError)
        assert isinstance(error.__cause__, ArithmeticError)


class Instant:
    """An accelerator whose copies end before the call that begins them; some calls raise."""

    def __init__(self, refuse: int = 0) -> None:
        self.calls, self.refuse = 0, refuse

    def _copy(self, dst: Any, src: Any, *, after: Any, on_done: Callable[[CopyDone], None]) -> Any:
        self.calls += 1
        if self.calls == self.refuse:
            raise ArithmeticError("no link")
        on_done(CopyDone(0, 1, dst.numel()))
        return f"event {self.calls}"

    copy_in = copy_out = _copy


@pytest.mark.parametrize("leg", ["start", "back"])
def test_what_follows_waits_for_every_copy(leg: str) -> None:
    """The next leg begins once, when the events of all copies are known, however soon they end."""
    parts = RecordParts(*(Place(overspill.Tier.HOST, 4096 * i, 4096) for i in range(3)))
    there = RecordParts(*(Place(overspill.Tier.DEVICE, 4096 * i, 4096) for i in range(3)))
    slot = Place(overspill.Tier.DEVICE, 0, 3 * 4096)
    update = Update(0, 0, parts.weights, parts.grads, parts.state, slot)
    arenas = Arenas(*(torch.zeros(3 * 4096, dtype=torch.uint8) for _ in range(2)))
    for refuse in (0, 1, 2):
        events, seen = RangeEvents(), list[int]()

        def told(*_: object, events: Any = events, seen: Any = seen) -> None:
            seen.append(len(events.over(slot)))

        accelerator: Any = Instant(refuse)
        device_updates = DeviceUpdates(
            arenas, accelerator, events, Trace(), lambda _: (parts, there), lambda _: "h.0",
            told, told,
        )  # fmt: skip
        begin = getattr(device_updates, leg)
        if refuse:
            with pytest.raises(ArithmeticError):
                begin(update)
            assert seen == [], "who began it ends it"
        else:
            begin(update)
            assert seen == [3 if leg == "start" else 2]
