"""Runs work on a thread that no signal interrupts, for a caller that one may.

Python runs signal handlers on the main thread, and what they raise comes up at any line there.  A
transfer that is half begun, or that goes on after its caller has gone, would land in memory that
has become somebody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Unsignalled:
    """One thread, made when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._left = False  # whether a caller may have gone before his work was over

    def run(self, work: Callable[[], Result]) -> Result:
        """Does ``work`` there, and returns when it is over, whatever is raised meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, self._name)
        self.finish()
        self._left = True
        try:
            future = self._pool.submit(work)
            result = future.result()
        except BaseException:
            self.finish()
            raise
        self._left = False
        return result

    def finish(self) -> None:
        """Waits for work whose caller was interrupted."""
        if self._left and self._pool is not None:
            self._pool.submit(_nothing).result()
            self._left = False

    def close(self) -> None:
        """Ends the thread."""
        if self._pool is not None:
            self._pool.shutdown()


def _nothing() -> None:
    """Comes after all that was there before."""
