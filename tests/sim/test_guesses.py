"""Prefetch where steps differ: wrong guesses move few bytes, and right ones come back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from overspill.schedule.guesses import GuessCredit
from overspill.schedule.layout import Layout
from overspill.schedule.messages import CopyIn, Need, Read, Release, Repeat, Signal, Step
from overspill.schedule.update_queue import DueUpdates
from tests.sim.test_scripts import Script, layout

UNITS, DEPTH = 12, 3
PLACES = {
    "cpu": layout((1,) * UNITS, host_weights=5, host_grads=2),
    "device": layout(
        (1,) * UNITS, host_weights=6, host_grads=4, device_weights=5, device_grads=2
    ),
}  # fmt: skip


def orders(kind: str, steps: int, seed: int = 0) -> Iterator[list[int]]:
    """The order of units in the forward of each step."""
    rng, units = random.Random(seed), list(range(UNITS))
    other = rng.sample(units, UNITS)
    half = UNITS // 2
    for number in range(steps):
        odd = number % 2
        yield {
            "same": units,
            "reversed": units if odd else units[::-1],
            "two orders": units if odd else other,
            "two tasks": units[:half] if odd else units[half:],
            "one head of two": [*units[:4], *(units[4:8] if odd else units[8:])],
            "random": rng.sample(units, UNITS),
            "dropped": [unit for unit in units if rng.random() > 0.2] or [0],
        }[kind]


class Steps(Script):
    """Runs steps (forward, or forward, backward and updates) and counts the bytes that move."""

    def __init__(self, made: Layout, *, trains: bool, depth: int = DEPTH) -> None:
        super().__init__(replace(made, prefetch_depth=depth))
        self.trains = trains
        self.moved = {Read: 0, CopyIn: 0}
        self.work: list[object] = []
        self.uses = self.waits = self._ticket = 0

    def send(self, signal: Signal) -> None:
        before = len(self.under_way)
        super().send(signal)
        for work in self.under_way[before:]:
            self.work.append(work)
            if isinstance(work, (Read, CopyIn)):
                self.moved[type(work)] += work.place.nbytes

    def _use(self, unit: int) -> None:
        self.uses += 1
        self._ticket += 1
        self.send(Need(unit, self._ticket))
        self.waits += self._ticket not in self.granted
        self.end_all()
        assert self._ticket in self.granted

    def step(self, order: list[int]) -> None:
        """One step, all moves of which end before the next use."""
        for unit in order:
            self._use(unit)
            self.send(Release(unit))
            self.end_all()
        for unit in reversed(order) if self.trains else ():
            self._use(unit)
            self._ticket += 1
            self.gather(unit, self._ticket)
            self.send(Release(unit))
            self.end_all()
        self._ticket += 1
        trained = tuple(sorted(order))
        self.send(Step(trained, self._ticket, background=True) if self.trains else Repeat())
        self.end_all()


def run(steps: Steps, given: Iterator[list[int]]) -> list[int]:
    """Runs steps; the waits of each."""
    waits = []
    for order in given:
        before = steps.waits
        steps.step(order)
        waits.append(steps.waits - before)
    return waits


def moved(kind: str, place: str, trains: bool, depth: int) -> dict[type, int]:
    """The bytes moved from the eleventh to the thirtieth step."""
    steps, given = Steps(PLACES[place], trains=trains, depth=depth), orders(kind, 30)
    run(steps, islice(given, 10))
    before = dict(steps.moved)
    run(steps, given)
    return {move: nbytes - before[move] for move, nbytes in steps.moved.items()}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "kind", ["reversed", "two orders", "two tasks", "one head of two", "random", "dropped"]
)
def test_wrong_guesses_move_few_bytes(
    kind: str, place: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly more than in the same memory without any prefetch, once ten steps have gone by."""
    with_guesses = moved(kind, place, trains, DEPTH)
    monkeypatch.setattr(DueUpdates, "prefetch", lambda self: None)
    on_demand = moved(kind, place, trains, 0)
    for move, nbytes in with_guesses.items():
        assert nbytes <= 1.1 * on_demand[move], (move, nbytes / on_demand[move])


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_limited_while_the_order_holds(
    place: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every move is the one that prefetch without a limit would have made."""
    limited = Steps(PLACES[place], trains=trains)
    run(limited, orders("same", 12))
    monkeypatch.setattr(GuessCredit, "__bool__", lambda self: True)
    free = Steps(PLACES[place], trains=trains)
    run(free, orders("same", 12))
    assert limited.work == free.work


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_prefetch_comes_back_once_an_order_holds_again(place: str, trains: bool) -> None:
    steady = run(Steps(PLACES[place], trains=trains), orders("same", 10))
    steps = Steps(PLACES[place], trains=trains)
    assert min(run(steps, orders("random", 30))[10:]) > steady[-1], "without prefetch they wait"
    again = run(steps, orders("same", 40))
    assert again[-1] == steady[-1] < UNITS / 2


@pytest.mark.parametrize("place", PLACES)
def test_one_differing_step_does_not_stop_prefetch(place: str) -> None:
    """An evaluation, which has no backward."""
    steps, last = Steps(PLACES[place], trains=True), []
    for _ in range(6):
        last.append(run(steps, orders("same", 20))[-1])
        steps.trains = False
        run(steps, orders("same", 1))
        steps.trains = True
    assert len(set(last)) == 1 and last[0] < UNITS
