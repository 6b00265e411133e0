"""Which thread trains: the one that may use the model and its optimizer."""

from __future__ import annotations

import threading

from ..errors import OffloadError
from .torch_private import in_backward


class Trainer:
    """The thread that trains; at first the one that makes this."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._at_work: set[threading.Thread] = set()
        self._closer: threading.Thread | None = None

    def claim(self) -> None:
        """The calling thread is the one that trains; not one that autograd lent it for a backward
        pass, in which modules are called again where a checkpoint recomputes."""
        if not in_backward():
            self._thread = threading.current_thread()
            self._at_work.add(self._thread)

    def begins(self) -> None:
        """A forward of the whole model begins."""
        self._at_work.clear()

    def alone(self) -> bool:
        """Whether no other thread has claimed since: it may run a part of the same forward."""
        me = threading.current_thread()
        return not any(t is not me and t.is_alive() for t in list(self._at_work))

    def closes(self) -> None:
        """The calling thread ends all, whoever trains."""
        self._closer = threading.current_thread()

    def require(self) -> None:
        """Raises unless the calling thread trains, runs a part of the same forward, or a backward
        pass.  After the end of the one that trained, any may go on.

        Raises:
            OffloadError: it does neither.
        """
        if in_backward():  # maybe on a thread of autograd's, which Python is not to hear of
            return
        current = threading.current_thread()
        mine = current in (self._thread, self._closer) or current in self._at_work
        if not mine and self._thread.is_alive():
            raise OffloadError(
                f"thread {current.name!r} uses the model or its optimizer while "
                "another one trains it; do this in the thread that trains, and hand the result over"
            )
