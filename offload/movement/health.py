"""The state of an engine: usable, failed, closing or closed, and the errors raised for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

from ..errors import BudgetError, IoError, LifecycleError, OffloadError

_READ = (
    "nothing more is trained or committed, but weights and state can still be read: save "
    "model.state_dict() and optimizer.state_dict(), or call overspill.unwrap(model), and wrap the "
    "model with another nvme= to go on"
)


class _Process:
    """The id of this process, without a system call for each check."""

    pid = os.getpid()

    @classmethod
    def renew(cls) -> None:
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Process.renew)


class Health:
    """Whether one engine works, has failed, is being closed, or is closed.

    Attributes:
        error: the first failure in the background.
        not_committed: the error of a commit after which nothing more can be committed.
        closed: the pump answers no more requests.
    """

    def __init__(self, store: Callable[[], str | None] = lambda: None) -> None:
        """
        Args:
            store: returns the folder of the durable store, once it has a commit.
        """
        self._store = store
        self.error: BaseException | None = None
        self.not_committed: BaseException | None = None
        self.closed = False
        self._raised = False  # the error was raised once, to some caller
        self._closer: int | None = None  # the thread that closes the engine
        self._owner = _Process.pid

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def ended(self) -> bool:
        """Whether the engine has failed or was closed."""
        return self.closed or self.failed

    @property
    def forked(self) -> bool:
        """Whether this process is a fork, without the engine's threads and files."""
        return _Process.pid != self._owner

    def fail(self, error: BaseException) -> None:
        """Record the first error. Thread-safe."""
        if self.error is None:
            self.error = error

    def cannot_commit(self, error: BaseException) -> None:
        """Record that a commit failed: training must stop, but everything can still be read."""
        if self.not_committed is None:
            self.not_committed = error

    def require_commits(self) -> None:
        """Raise if a commit has failed: the error itself once, then a refusal.

        Raises:
            OffloadError: a commit has failed. Memory and the store can still be read.
        """
        if self.not_committed is None:
            return
        if not self._raised:
            self._raised = True
            if isinstance(self.not_committed, IoError):
                raise self.not_committed.with_remedy(_READ) from self.not_committed
            raise LifecycleError(f"{self.not_committed}; {_READ}") from self.not_committed
        raise LifecycleError(
            f"the engine stopped after an earlier error; {_READ}"
        ) from self.not_committed

    def raise_unseen(self) -> None:
        """Raise the error of a failed commit, unless it was raised before."""
        if self.not_committed is not None and not self._raised:
            self.require_commits()

    def closes(self) -> None:
        """Let only the calling thread use the engine from now on, so that it can close it."""
        self._closer = threading.get_ident()

    @property
    def closed_elsewhere(self) -> bool:
        """Whether another thread closes the engine, and so releases all that compute uses.

        That thread waits only for code of the engine that ran before it began to close.
        """
        return self._closer not in (None, threading.get_ident())

    def check(self) -> None:
        """Raise the background error, if any: once with its cause, then as a refusal.

        Raises:
            OffloadError: the engine has failed, is closed, or is not this thread's or process's.
        """
        if self.forked:
            raise LifecycleError(
                "this process was forked from the one that wrapped the model, and has neither its "
                "threads nor its files; use the model in the parent, or wrap one here"
            )
        if self.closed:
            store = self._store()
            kept = "" if store is None else f" and call overspill.resume(model, {store})"
            raise LifecycleError(
                f"the engine is closed, and its weights are released; build the model again{kept} "
                "(overspill.unwrap(model) before close() keeps them)"
            )
        if self._closer is not None and self.closed_elsewhere:
            raise LifecycleError(
                "the engine is being closed by another thread, or a signal handler"
            )
        if self.error is not None:
            self.raise_to_asker(self.error)

    def _way_out(self) -> str:
        store = self._store()
        if store is None:
            return (
                "call close() on what wrap returned, build the model again, and load what was "
                "saved last"
            )
        return (
            "call close() on what wrap returned, build the model again, and continue from the last "
            f"commit with overspill.resume(model, {store})"
        )

    def raise_to_asker(self, error: BaseException) -> NoReturn:
        """Raise a background error in the thread whose request it has failed."""
        try:
            if isinstance(error, BudgetError) and self.error is None:
                raise error
            if self._raised:
                raise LifecycleError(
                    "the engine stopped after an earlier error, and some of its weights may be a "
                    f"step ahead of others; {self._way_out()}"
                ) from error
            self._raised = True
            if isinstance(error, OffloadError):
                raise error
            raise LifecycleError(
                f"a background operation failed with {type(error).__name__}: {error}"
            ) from error
        finally:  # an error that its own frame refers to lives until a garbage collection
            del error
