"""Runs work on a thread that no signal interrupts, for a caller that one may.

Python runs signal handlers on the main thread, and what they raise comes up at any line there.  A
transfer that is half begun, or that goes on after its caller has gone, would land in memory that
has become somebody else's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..io_engine.one_shot_event import OneShotEvent

Result = TypeVar("Result")


class _Task:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.over = work, OneShotEvent()
        self.result: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.over.set()


class UninterruptibleThread:
    """One thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._left = False  # whether a caller may have gone before his work was over
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.do()
            del task  # it may hold memory

    def run(self, work: Callable[[], Result]) -> Result:
        """Does ``work`` there, and returns when it is over, whatever is raised meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        self.finish()
        self._left = True
        try:
            task = _Task(work)
            self._tasks.put(task)
            task.over.wait()
        except BaseException:
            self.finish()
            raise
        self._left = False
        if task.error is not None:
            raise task.error
        result: Result = task.result
        return result

    def finish(self) -> None:
        """Waits for work whose caller was interrupted."""
        if self._left:
            behind = _Task(_nothing)
            self._tasks.put(behind)
            behind.over.wait()
            self._left = False

    def close(self) -> None:
        """Ends the thread."""
        self._tasks.put(None)
        self._thread.join()


def unsignalled(work: Callable[[], None], name: str) -> None:
    """Does ``work`` once, on a thread of its own, and returns when it is over.  Whoever is
    interrupted before it has begun may call again: ``work`` may come twice, and both at a time."""
    task = _Task(work)
    thread = threading.Thread(target=task.do, name=name)
    try:
        try:
            thread.start()
        except RuntimeError:  # no thread can be started any more
            task.do()
        task.over.wait()
        if thread.ident is not None:
            thread.join()
    except BaseException:
        if thread.is_alive():
            task.over.wait()
        raise
    if task.error is not None:
        raise task.error


def _nothing() -> None:
    """Comes after all that was there before."""
