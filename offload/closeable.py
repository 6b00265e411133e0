"""When an engine ends: when it is closed, when nobody has its model or its optimizer any more, or
with the process."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import threading
import weakref
from typing import Any

from .movement.uninterruptible_thread import unsignalled
from .training.reentrancy import callers, is_engine

log = logging.getLogger("overspill")


class Closeable:
    """What is ended once, by whoever comes first.  It lives from ``lives`` on."""

    _owner: int
    _ending: threading.RLock  # by whoever comes first, once

    def lives(self) -> None:
        """From here on there is something to end."""
        self._ending, self._begun = threading.RLock(), False
        self._owner = os.getpid()

    def may_close(self) -> None:
        """It is whole: ``close`` and the end of the process end it."""
        _open.add(self)

    @property
    def belongs_here(self) -> bool:
        """Whether this is the process that created it, not a forked child."""
        return self._owner == os.getpid()

    def leave(self) -> None:
        """Takes what it has on the calling thread, which may not be the one that ends it."""
        raise NotImplementedError

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
        parent's.  What interrupts it comes up when it has ended: half of an end is none."""
        if os.getpid() != self._owner:
            return
        if self._cannot_wait():
            if self in _open:
                threading.Thread(target=self._end, name=_NAME).start()
            return
        self.leave()
        if self in _open:
            if threading.current_thread() is threading.main_thread():
                unsignalled(self._end, _NAME)
            else:
                self._end()

    def _cannot_wait(self) -> bool:
        """Whether the collector, or a signal handler, has come by on a thread of the engine's own,
        or where the engine holds a lock: neither can wait for itself."""
        return threading.current_thread().name.startswith("overspill") or is_engine(callers())

    def _end(self) -> None:
        with self._ending:
            if not self._begun:
                self._begun = True
                try:
                    self.finish()
                finally:
                    _open.discard(self)

    def __del__(self) -> None:
        """Neither the model nor its optimizer is in use any more: they and this are one cycle, and
        no thread of the engine's holds it.  Weak references to it are gone by now."""
        if not hasattr(self, "_owner") or self.finished or os.getpid() != self._owner:
            return
        if self._cannot_wait() or _amid_threading():
            threading.Thread(target=self._end, name=_NAME).start()
        else:
            self.leave()
            self._end()  # here: whatever the collector came by amid may hold a lock of others


_open: weakref.WeakSet[Closeable] = weakref.WeakSet()


def living() -> list[Closeable]:
    """Return the objects of this process that are not closed, without those of a forked parent."""
    return [each for each in _open if each.belongs_here]


def end_unused() -> None:
    """Closes engines whose model and optimizer nobody has any more, for the room that they hold."""
    if _open:
        gc.collect()


def _forked() -> None:
    for living in list(_open):
        living.forked()


@atexit.register
def _exit() -> None:
    came: list[int] = []  # what these would raise comes up when all are closed
    before = _take_signals(came)
    for living in list(_open):
        try:
            if os.getpid() == living._owner:
                living.leave()
                living._end()  # here: no thread can be started any more
        except Exception:  # the others are to be closed all the same
            log.exception("overspill: an engine could not be closed at the end of the process")
    for number, handler in before.items():
        signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


def _take_signals(came: list[int]) -> dict[int, Any]:
    """Has signals that Python handles put into ``came``; gives the handlers they had."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    before: dict[int, Any] = {each: handler for each, handler in found.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda which, _frame: came.append(which))
    return before


def _amid_threading() -> bool:
    """Whether the calling thread holds the lock that every thread takes when it ends: the collector
    has come by amid the library of threads."""
    lock: Any = getattr(threading, "_active_limbo_lock", None)
    return lock is not None and bool(lock._is_owned())


_NAME = "closes-overspill"
os.register_at_fork(after_in_child=_forked)
