"""Something that happens once, for threads that signals interrupt."""

from __future__ import annotations

import queue
import time

_LOOK_S = 0.5  # whoever was passed over, since a waiter was interrupted, looks again after this


class OneShotEvent:
    """As ``threading.Event``, without ``clear``: an exception that a signal handler raises in
    ``wait``, at whatever line, leaves it as it was.  One in the lock of an ``Event`` leaves that
    locked, and whoever comes to ``set`` it hangs."""

    __slots__ = ("_bell", "_happened")

    def __init__(self) -> None:
        self._happened = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # all C, and reentrant

    def set(self) -> None:
        """It has happened: whoever waits goes on."""
        self._happened = True
        self._bell.put(None)

    def is_set(self) -> bool:
        """Whether it has."""
        return self._happened

    def wait(self, timeout: float | None = None) -> bool:
        """Returns once it has happened, or after ``timeout`` seconds; whether it has."""
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
