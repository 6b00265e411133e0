"""The end of an engine: on ``close``, when its model is no longer in use, or with the process.

See Note [Closing engines].
"""

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
from .private.reentrancy import callers, is_engine

# Note [Closing engines]
# An engine owns threads, memory, files and a store whose last step has to be committed, so it is
# closed in one of three ways, whichever comes first: by ``close()``, by the garbage collector
# (``__del__``), or at interpreter exit (``_exit``).  ``_end`` makes sure that ``finish`` runs once.
#
# - ``close()`` must not be torn by an exception such as Ctrl-C.  On the main thread ``finish`` runs
#   on a thread that gets no signals, and an interrupt is raised afterwards.
# - The garbage collector can run on any thread, between any two bytecodes: on one of the engine's
#   own threads, or while the engine or ``threading`` holds a lock.  ``finish`` joins threads and
#   takes locks, so it would wait for itself.  In these cases it runs on a new thread.  The same
#   holds for a signal handler that calls ``close()`` while the engine's code runs.
# - At exit no thread can be started, so ``finish`` runs directly, and signals are deferred.
# - In a forked child the engine's threads do not exist, and memory and files are the parent's.  So
#   nothing is closed, and ``forked`` makes parameters unusable.

log = logging.getLogger("overspill")


class Closeable:
    """An object that is closed exactly once.  See Note [Closing engines]."""

    _owner: int
    _ending: threading.RLock  # held while it is closed

    def lives(self) -> None:
        """Mark that resources exist that have to be closed."""
        self._ending, self._begun = threading.RLock(), False
        self._owner = os.getpid()

    def may_close(self) -> None:
        """Mark construction as complete: from now on ``close`` and interpreter exit close it."""
        _open.add(self)

    @property
    def belongs_here(self) -> bool:
        """Whether this is the process that created it, not a forked child."""
        return self._owner == os.getpid()

    def leave(self) -> None:
        """Remove its hooks from the calling thread, which need not be the one that closes it."""
        raise NotImplementedError

    def finish(self) -> None:
        """End all threads, and free all memory and disk space."""
        raise NotImplementedError

    def forked(self) -> None:
        """Invalidate the object in a forked child, where its memory and threads are unusable."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether ``finish`` has run."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it; a second call, or one in a forked child, does nothing.

        An interrupt is raised only after closing is complete.
        """
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
        """Return whether this code interrupts the engine, so that waiting could deadlock.

        That is a garbage collection or a signal handler on one of the engine's threads, or while
        the engine holds a lock.
        """
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
        """Close it when neither the model nor its optimizer is in use any more.

        Both are in one reference cycle with this object, to which no engine thread refers.  Weak
        references to it are already cleared.
        """
        if not hasattr(self, "_owner") or self.finished or os.getpid() != self._owner:
            return
        if self._cannot_wait() or _amid_threading():
            threading.Thread(target=self._end, name=_NAME).start()
        else:
            self.leave()
            # not on another thread, which could need a lock that the interrupted code holds
            self._end()


_open: weakref.WeakSet[Closeable] = weakref.WeakSet()


def living() -> list[Closeable]:
    """Return the objects of this process that are not closed, without those of a forked parent."""
    return [each for each in _open if each.belongs_here]


def end_unused() -> None:
    """Close engines whose model and optimizer are no longer referenced, to free their memory."""
    if _open:
        gc.collect()


def _forked() -> None:
    for living in list(_open):
        living.forked()


@atexit.register
def _exit() -> None:
    came: list[int] = []  # raised again when all are closed
    before = _take_signals(came)
    for living in list(_open):
        try:
            if os.getpid() == living._owner:
                living.leave()
                living._end()  # directly: no thread can be started any more
        except Exception:  # the others must still be closed
            log.exception("overspill: an engine could not be closed at the end of the process")
    for number, handler in before.items():
        signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


def _take_signals(came: list[int]) -> dict[int, Any]:
    """Append signals that Python handles to ``came``; return the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    before: dict[int, Any] = {each: handler for each, handler in found.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda which, _frame: came.append(which))
    return before


def _amid_threading() -> bool:
    """Return whether the garbage collector has interrupted the ``threading`` module.

    That is, whether the calling thread holds the lock that every thread takes when it ends.
    """
    lock: Any = getattr(threading, "_active_limbo_lock", None)
    return lock is not None and bool(lock._is_owned())


_NAME = "closes-overspill"
os.register_at_fork(after_in_child=_forked)
