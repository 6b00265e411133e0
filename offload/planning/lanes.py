"""Lanes of the simulation, and the work that they do beside the machine's own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ..schedule.messages import SavedBytes, Update, Work

LEGS = {"copy_in": "update", "update": "copy_out"}  # of a visit, each with the next


class ComputePart(NamedTuple):
    """Of a unit's compute: what of that saved it needs first, how long it takes, what it saves."""

    seconds: float
    needed: SavedBytes | None = None
    saved: SavedBytes | None = None


@dataclass(frozen=True)
class Compute:
    """What the compute lane does: one unit's forward or backward."""

    unit: int


@dataclass(frozen=True)
class Leg:
    """What an update of a record that visits the device does in one lane, of ``LEGS`` in turn."""

    update: Update
    lane: str


class Lane:
    """Work in line, and the piece that is being done."""

    __slots__ = (
        "current", "left_s", "line", "name", "seen_s", "speed", "started_s", "told", "turn",
        "urgent",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.told = "update" if name == "there" else name  # what a trace calls it
        self.line: deque[Work | Leg] = deque()
        self.urgent: deque[Work | Leg] = deque()
        self.current: Work | Leg | Compute | None = None
        self.started_s = 0.0
        self.left_s = self.seen_s = 0.0  # of the piece, at full speed, when last looked at
        self.speed, self.turn = 1.0, 0  # an end foreseen in an earlier turn does not come
