"""Edits of weights and state between steps, committed or not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ..movement.direct import DirectAccess
from ..movement.executor import Executor
from ..schedule.messages import Judged, Key, Kind
from ..schedule.units import Unit
from ..training.frames import Frames
from ..training.landing import Landing
from ..training.showing import Showing
from .contents import EditedParts

log = logging.getLogger("overspill")


def spoil(executor: Executor, unit: Unit) -> None:
    """A unit was given values that are not finite."""
    executor.requests.tell(Judged(unit.index, finite=False))
    executor.requests.catch_up()
    log.warning(
        "overspill: %r was given values that are not finite; nothing is committed until they are, "
        "or until rollback()", unit.name,
    )  # fmt: skip


class Spoils(Protocol):
    """Who commits, and must not while an edit is half made."""

    def editing(self, parts: EditedParts) -> AbstractContextManager[Callable[[int], None]]: ...


class Edits:
    """The one way in which weights and state are changed from outside of a step."""

    def __init__(
        self,
        executor: Executor,
        frames: Frames,
        showing: Showing,
        landing: Landing,
        direct: DirectAccess,
        commits: Spoils | None,
    ) -> None:
        self._executor, self._frames, self._showing = executor, frames, showing
        self._landing, self._direct, self._commits = landing, direct, commits
        self._units = executor.layout.units

    def restore(self, units: Iterable[int]) -> None:
        """Restore the original weights of units that cannot be changed.

        Units without a second copy (neither durable nor read in place) are left as they are.
        """
        self._stop_moves(units)
        layout = self._executor.layout
        for unit in units:
            if layout.durable or unit in layout.in_place:
                self._direct.reload(Key(Kind.WEIGHTS, unit))

    def _stop_moves(self, units: Iterable[int]) -> None:
        self._executor.health.check()
        self._frames.tidy()
        for unit in units:
            self._showing.refuse_edit(unit)
        self._landing.land()
        self._direct.quiesce()

    @contextmanager
    def of(self, parts: EditedParts) -> Iterator[Callable[[int], None]]:
        """Inside, nothing moves, and weights and state may be edited: that belongs to the state
        after the last step.  Gives what is to be called with a unit that was given values that are
        not finite.

        Raises:
            IoError: weights that are not trained have no room on disk for others; nothing changes.
        """
        self._stop_moves(parts)
        for unit in parts:
            if not self._units[unit].trainable:
                self._direct.reserve(Key(Kind.WEIGHTS, unit))
        if self._commits is None:
            yield lambda unit: None
        else:
            with self._commits.editing(parts) as spoil:
                yield spoil
