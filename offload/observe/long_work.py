"""Long work tells how far it has come: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from ..errors import format_bytes

log = logging.getLogger("overspill")

AFTER_S = 1.0  # what is over sooner says nothing
EVERY_S = 10.0  # between lines


class LongWork:
    """Inside, what is given is called with the bytes of every part that is done::

    with LongWork("loading weights", nbytes) as done:
        done(part.nbytes)
    """

    def __init__(self, what: str, nbytes: int) -> None:
        """
        Args:
            what: is done, in words.
            nbytes: of all of it.
        """
        self._what, self._total, self._done = what, nbytes, 0
        self._began = self._told = time.perf_counter()
        self._bar: Any = None
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Callable[[int], None]:
        return self._advance

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.perf_counter()
        if now - self._began < AFTER_S:
            return
        if self._terminal:
            self._draw()
        elif now - self._told >= EVERY_S:
            self._told = now
            log.info("overspill: %s, %s", self._what, self._so_far(now))

    def _so_far(self, now: float) -> str:
        rate = self._done / max(now - self._began, 1e-9) / 1e9
        done, total = format_bytes(self._done), format_bytes(max(self._done, self._total))
        return f"{done} of {total}, {rate:.2g} GB/s"

    def _draw(self) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (
                TextColumn("{task.description}", markup=False), BarColumn(),
                DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.update(self._task, completed=min(self._done, self._total))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.stop()
        if now - self._began >= AFTER_S and kind is None:
            took = f"{now - self._began:.3g} s"
            log.info("overspill: %s took %s, %s", self._what, took, self._so_far(now))
