"""Runs work on a thread that no signal interrupts, for a caller that can be interrupted.

Python runs signal handlers on the main thread. What they raise can come up at any line there. A
transfer that is torn, or that continues after its caller has left, would write to memory that is
already used for something else.
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
    """A thread that runs work for the main thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._left = False  # whether an interrupted caller may have left work unfinished
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.do()
            del task  # it may hold memory

    def run(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on the thread and return its result.

        An exception that interrupts the wait is raised after the work is over. On a thread other
        than the main thread, ``work`` runs directly.
        """
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
        """Wait for work whose caller was interrupted."""
        if self._left:
            behind = _Task(_nothing)
            self._tasks.put(behind)
            behind.over.wait()
            self._left = False

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join()


def unsignalled(work: Callable[[], None], name: str) -> None:
    """Run ``work`` on a new thread, and return when it is over.

    A caller that was interrupted before ``work`` began may call again. So ``work`` may run twice,
    also at the same time.
    """
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
    """Do nothing: a task that ends after all tasks queued before it."""
