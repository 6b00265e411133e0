"""What whoever does not train is told of an engine that has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overspill.errors import OffloadError
from overspill.facts.tier import Tier
from overspill.movement.engine_port import EnginePort
from overspill.movement.health import Health


def engine_port(health: Health) -> EnginePort:
    unit, home = SimpleNamespace(index=0), SimpleNamespace(grads=Tier.HOST)
    layout: Any = SimpleNamespace(
        units=(unit,), homes=(home,), compute_tier=Tier.HOST, has_device=False, trains=True
    )
    nothing: Any = None
    return EnginePort(layout, health, nothing, nothing, tuple)


def test_it_is_told_why() -> None:
    health = Health()
    asked = engine_port(health)
    broken = OSError("the disk is full")
    health.fail(broken)
    with pytest.raises(OffloadError, match=r"has ended: the disk is full") as told:
        asked.await_update(0)
    assert told.value.__cause__ is broken


def test_a_closed_engine_has_no_reason() -> None:
    health = Health()
    asked = engine_port(health)
    health.closed = True
    with pytest.raises(OffloadError, match=r"has ended(\n|$)"):
        asked.await_update(0)


def test_the_first_failure_is_told_once_and_refuses_then() -> None:
    health = Health()
    health.fail(OSError("the disk is full"))
    health.fail(ValueError("what came of it"))
    with pytest.raises(
        OffloadError, match="a background operation failed with OSError: the disk is full"
    ):
        health.check()
    with pytest.raises(OffloadError, match="stopped after an earlier error") as told:
        health.check()
    assert isinstance(told.value.__cause__, OSError)
