"""Edits of weights and optimizer state between steps, with or without commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ..grads.update_waiter import UpdateWaiter
from ..movement.direct import DirectAccess
from ..movement.executor import Executor
from ..params.resident_param_guard import ResidentParamGuard
from ..schedule.messages import FiniteCheck, Key, Kind
from ..schedule.units import Unit
from ..step.forward_stack import ForwardStack
from .contents import EditedParts

log = logging.getLogger("overspill")


def spoil(executor: Executor, unit: Unit) -> None:
    """Record that a unit got non-finite values, which blocks commits, and log a warning."""
    executor.engine_port.tell(FiniteCheck(unit.index, finite=False))
    executor.engine_port.catch_up()
    log.warning(
        "overspill: %r was given values that are not finite; nothing is committed until they are, "
        "or until rollback()", unit.name,
    )  # fmt: skip


class Spoils(Protocol):
    """The part of commits that edits use: no commit may happen while an edit is half done."""

    def editing(self, parts: EditedParts) -> AbstractContextManager[Callable[[int], None]]: ...


class Edits:
    """The only way to change weights and state outside of a step."""

    def __init__(
        self,
        executor: Executor,
        forward_stack: ForwardStack,
        resident_guard: ResidentParamGuard,
        update_waiter: UpdateWaiter,
        direct: DirectAccess,
        commits: Spoils | None,
    ) -> None:
        self._executor, self._forward_stack, self._resident_guard = (
            executor,
            forward_stack,
            resident_guard,
        )
        self._update_waiter, self._direct, self._commits = update_waiter, direct, commits
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
        self._forward_stack.tidy()
        for unit in units:
            self._resident_guard.refuse_edit(unit)
        self._update_waiter.wait_for_updates()
        self._direct.quiesce()

    @contextmanager
    def of(self, parts: EditedParts) -> Iterator[Callable[[int], None]]:
        """Stop all transfers for the duration of the block, so that ``parts`` may be edited.

        The edit belongs to the state after the last step.  The block receives a function to be
        called with each unit that was given non-finite values.

        Raises:
            IoError: the disk has no room to store edited weights that are not trained; nothing
                changes.
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
