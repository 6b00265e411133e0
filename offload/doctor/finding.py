"""One thing that was looked at: what was found, what that means, and what mends it."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class State(enum.Enum):
    """How good it is."""

    GOOD = "good"
    NOTE = "note"  # it is so; nothing works worse for it
    SLOW = "slow"  # everything works, and costs time
    BROKEN = "broken"  # something does not work


@dataclass(frozen=True)
class Finding:
    """Attributes:
    about: what was looked at, a word or two.
    found: its value, for people.
    state: how good that is.
    meaning: what it does for a run; where it is not good, what it costs.
    remedy: the command or step that mends it; empty where nothing is to be mended.
    figures: values behind it, for programs: bytes, bytes per second, versions.
    """

    about: str
    found: str
    state: State
    meaning: str
    remedy: str = ""
    figures: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}
