"""Something that happens once, for threads that signals interrupt."""

from __future__ import annotations

import queue
import time

_LOOK_S = 0.5  # a waiter whose wake-up went to an interrupted one looks again after this


class OneShotEvent:
    """A ``threading.Event`` without ``clear`` that is safe against exceptions in signal handlers.

    An exception that a handler raises in ``wait``, at any line, leaves this event intact.  In an
    ``Event`` it can leave the lock locked, and then ``set`` hangs.
    """

    __slots__ = ("_bell", "_happened")

    def __init__(self) -> None:
        self._happened = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # all C, and reentrant

    def set(self) -> None:
        """Set the event and wake all waiters."""
        self._happened = True
        self._bell.put(None)

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._happened

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or for ``timeout`` seconds; return whether it is set."""
        ends_s = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left_s = _LOOK_S if ends_s is None else min(_LOOK_S, ends_s - time.monotonic())
            if left_s <= 0:
                return False
            try:
                self._bell.get(timeout=left_s)
            except queue.Empty:
                continue
            self._bell.put(None)  # for the next one
        return True
