"""The lanes of the simulator, and work that the residency machine has no instruction for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ..schedule.messages import SavedBytes, Update, Work

LEGS = {"copy_in": "update", "update": "copy_out"}  # the lanes of a visit, each with the next one


class ComputePart(NamedTuple):
    """A part of a unit's compute: the saved storage that it needs first, its time, and the storage
    that it saves."""

    seconds: float
    needed: SavedBytes | None = None
    saved: SavedBytes | None = None


@dataclass(frozen=True)
class Compute:
    """The work of the compute lane: one unit's forward or backward."""

    unit: int


@dataclass(frozen=True)
class Leg:
    """One leg of an update on the device of a record from host memory; see ``LEGS``."""

    update: Update
    lane: str


class Lane:
    """A queue of work, and the piece in progress.

    Attributes:
        told: name of the lane in a trace.
        line, urgent: work in the queue.
        left_s: seconds that the piece in progress still took at full speed at the time ``seen_s``.
        turn: incremented with each newly scheduled end; an end with an older turn is void.
    """

    __slots__ = (
        "current", "left_s", "line", "name", "seen_s", "speed", "started_s", "told", "turn",
        "urgent",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.told = "update" if name == "there" else name
        self.line: deque[Work | Leg] = deque()
        self.urgent: deque[Work | Leg] = deque()
        self.current: Work | Leg | Compute | None = None
        self.started_s = 0.0
        self.left_s = self.seen_s = 0.0
        self.speed, self.turn = 1.0, 0
