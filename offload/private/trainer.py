"""The training thread, the only one that may use the model and its optimizer."""

from __future__ import annotations

import threading

from ..errors import LifecycleError
from .torch_private import in_backward


class Trainer:
    """The thread that trains, at first the one that creates this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._at_work: set[threading.Thread] = set()
        self._closer: threading.Thread | None = None

    def claim(self) -> None:
        """Make the calling thread the training thread, unless it runs a backward pass.

        Autograd's threads also call modules, when a checkpoint recomputes.
        """
        if threading.get_ident() == self._thread.ident and self._thread in self._at_work:
            return
        if not in_backward():
            self._thread = threading.current_thread()
            self._at_work.add(self._thread)

    def begins(self) -> None:
        """Forget the threads that took part in the last forward: another one begins."""
        self._at_work.clear()

    def alone(self) -> bool:
        """Return whether no other live thread has claimed since; it may run part of the forward."""
        me = threading.current_thread()
        return not any(t is not me and t.is_alive() for t in list(self._at_work))

    def closes(self) -> None:
        """Allow the calling thread to close the engine, whichever thread trains."""
        self._closer = threading.current_thread()

    def require(self) -> None:
        """Raise unless the calling thread trains, runs part of its forward, or a backward pass.

        Once the training thread has ended, any thread may go on.

        Raises:
            OffloadError: another thread trains.
        """
        if in_backward():  # maybe on an autograd thread that Python does not know
            return
        current = threading.current_thread()
        mine = current in (self._thread, self._closer) or current in self._at_work
        if not mine and self._thread.is_alive():
            raise LifecycleError(
                f"thread {current.name!r} uses the model or its optimizer while "
                "another one trains it; do this in the thread that trains, and hand the result over"
            )
