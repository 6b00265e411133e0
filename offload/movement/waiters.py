"""Who waits for a grant of the machine's, and what for."""

from __future__ import annotations

import threading

from ..io_engine.one_shot_event import OneShotEvent
from ..schedule.messages import (
    Accumulate,
    Clear,
    Commit,
    CopyIn,
    CopyOut,
    Grant,
    Read,
    Signal,
    Update,
    Write,
)

# The lane of the work that whoever waits is kept by.
LANES: dict[type, str] = {
    Read: "read", Write: "write", CopyIn: "copy_in", CopyOut: "copy_out",
    Clear: "update", Accumulate: "update", Update: "update", Commit: "write",
}  # fmt: skip


class Waiter:
    """Somebody who waits for a grant; ``asker`` is his thread, ``lane`` what he waited for last."""

    __slots__ = ("abandoned", "asker", "error", "event", "grant", "lane", "signal", "ticket")

    def __init__(self, ticket: int, signal: Signal, lane: str) -> None:
        """``lane``: of a wait that no work has ended."""
        self.ticket, self.signal = ticket, signal
        self.asker = threading.get_ident()
        self.event = OneShotEvent()
        self.grant: Grant | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.lane = lane
