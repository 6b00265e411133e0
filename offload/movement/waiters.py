"""Threads that wait for a grant of the machine, and the lanes that they wait for."""

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

# The lane on which each kind of work runs, and which a thread waits for.
LANES: dict[type, str] = {
    Read: "read", Write: "write", CopyIn: "copy_in", CopyOut: "copy_out",
    Clear: "update", Accumulate: "update", Update: "update", Commit: "write",
}  # fmt: skip


class Waiter:
    """A request that waits for its grant.

    Attributes:
        asker: the thread that made the request.
        lane: the lane whose work it waited for last.
        abandoned: an exception ended the wait; the grant is to be returned.
    """

    __slots__ = ("abandoned", "asker", "error", "event", "grant", "lane", "signal", "ticket")

    def __init__(self, ticket: int, signal: Signal, lane: str) -> None:
        """
        Args:
            lane: the lane to name if no finished work ends the wait.
        """
        self.ticket, self.signal = ticket, signal
        self.asker = threading.get_ident()
        self.event = OneShotEvent()
        self.grant: Grant | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.lane = lane
