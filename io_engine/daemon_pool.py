"""A thread pool that still works while the interpreter exits.

Python shuts its own pools down before anything registered with ``atexit`` runs; transfers that are
on their way then could not end, and their engine could not be closed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonPool(Executor):
    """``threads`` daemon threads, joined by ``shutdown``."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """See ``concurrent.futures.Executor``."""
        future: Future[_T] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets what was submitted end, then the threads."""
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, run = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)
            del task, future, run  # nothing of the last transfer is kept while waiting
