"""What the next user of a range of device memory waits for."""

from __future__ import annotations

from typing import Any

from overspill.facts.tier import Tier
from overspill.movement.compute_use import RangeEvents
from overspill.schedule.arena import Place


def at(offset: int, nbytes: int) -> Place:
    return Place(Tier.DEVICE, offset, nbytes)


def test_a_use_takes_the_place_of_those_that_it_covers_alone() -> None:
    events: Any = RangeEvents()
    events.set(at(0, 100), "first")
    events.set(at(50, 100), "second")
    assert events.over(at(0, 10)) == ["first"], "it reaches beyond the second"
    assert events.over(at(60, 10)) == ["first", "second"]
    assert events.over(at(120, 10)) == ["second"]
    assert events.over(at(150, 10)) == []
    events.set(at(0, 120), "third")
    assert events.over(at(0, 10)) == ["third"]
    assert events.over(at(110, 20)) == ["second", "third"]
    events.set(at(0, 200), "last")
    assert events.over(at(0, 200)) == ["last"]
