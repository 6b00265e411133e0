"""When an engine ends: when it is closed, when nobody has its model or its optimizer any more, or
with the process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import weakref

from .training.callers import callers, is_engine

log = logging.getLogger("overspill")


class Living:
    """What is ended once, by whoever comes first.  It lives from ``lives`` on."""

    _owner: int

    def lives(self) -> None:
        """From here on there is something to end."""
        self._owner = os.getpid()

    def may_close(self) -> None:
        """It is whole: ``close`` and the end of the process end it."""
        _open.add(self)

    def finish(self) -> None:
        """Ends all threads, frees all memory and disk."""
        raise NotImplementedError

    def forked(self) -> None:
        """This is a forked child: nothing of it works here, its memory least of all."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether ``finish`` has run."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends it.  A second call does nothing, nor does one in a forked child: all that is its
        parent's."""
        if self in _open:
            self._end()

    def _end(self) -> None:
        if self.finished or os.getpid() != self._owner:
            return
        around = [frame for frame in callers() if frame.f_code not in _CLOSING]
        if threading.current_thread().name.startswith("overspill") or is_engine(around):
            # The collector, or a signal handler, has come by on a thread of the engine's own, or
            # where the engine holds a lock: neither can wait for itself.
            threading.Thread(target=self._end, name="closes-overspill").start()
            return
        _open.discard(self)  # nobody else closes it meanwhile
        self.finish()

    def __del__(self) -> None:
        """Neither the model nor its optimizer is in use any more: they and this are one cycle, and
        no thread of the engine's holds it.  Weak references to it are gone by now."""
        if hasattr(self, "_owner"):
            self._end()


_open: weakref.WeakSet[Living] = weakref.WeakSet()


def end_unused() -> None:
    """Closes engines whose model and optimizer nobody has any more, for the room that they hold."""
    if _open:
        gc.collect()


def _forked() -> None:
    for living in list(_open):
        living.forked()


@atexit.register
def _exit() -> None:
    for living in list(_open):
        try:
            living.close()
        except Exception:  # the others are to be closed all the same
            log.exception("overspill: an engine could not be closed at the end of the process")


_CLOSING = tuple(f.__code__ for f in (Living.close, Living.__del__, end_unused, _exit))
os.register_at_fork(after_in_child=_forked)
