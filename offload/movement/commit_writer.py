"""Writes commits on a thread of its own: flushes the data, then writes the record."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import OffloadError, WeightError
from ..facts.trace import Trace
from ..io_engine import IoEngine
from ..io_engine.manifest import Manifest
from ..io_engine.pins import Identity, pin_of
from ..schedule.messages import Commit, Key, Write
from .extents import Extents

_LONGEST = 16  # facts that are kept for cuts that may still be committed

# Note [Weights that change while they are saved]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# With ``device='cpu'`` a commit writes from the memory of the user's parameters. A user may change
# a weight in place during that write. The extent can then hold a mixture of old and new values,
# although its checksum is right for the bytes written.
#
# After such a write, ``check`` compares memory with the checksums of the extent, on this thread.
# If they differ, ``_doubted`` records the extent. A commit whose table contains such an extent
# fails in ``_flush``, and so do all later commits. If the edit is noticed before that commit, the
# new value is written to the same extent, and the check of this write clears the record. A write
# that needs no check (see ``Mover.may_be_changed``) clears it at once (``sound``).


class Agreement(Protocol):
    """The other ranks that must agree on a commit."""

    def agreed(self, number: int, step: int) -> None:
        """Block until all ranks have the commit of this number and step."""

    def ends(self) -> None:
        """Limit how long this rank waits for the others from now on."""


Ended = Callable[[BaseException | None], None]


class CommitWriter:
    """The commit thread. ``seal`` stores the facts of a cut before the machine may commit it.

    No lock guards the facts: a signal handler may call ``commit()`` while its own thread holds it.

    Attributes:
        last: the facts of the last commit.
    """

    def __init__(self, io: IoEngine, manifest: Manifest, extents: Extents, trace: Trace) -> None:
        self._io, self._manifest, self._extents, self._trace = io, manifest, extents, trace
        self._numbers = itertools.count(1)
        self._facts: dict[int, tuple[int, bytes, bool]] = {}
        # Extents with mixed values; see Note [Weights that change while they are saved].
        self._doubted: dict[tuple[Key, int], str] = {}
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Ended] | None] = queue.SimpleQueue()
        self._agreement: Agreement | None = None
        self.last: bytes | None = None
        self._error: OffloadError | None = None  # why a commit's data could not be made durable
        self._thread = threading.Thread(target=self._run, name="overspill-commit", daemon=True)
        self._thread.start()

    def seal(self, step: int, facts: bytes, kept: bool) -> int:
        """Store the facts of a cut, and return the number that its commit must name.

        Args:
            kept: no new store may replace this one.
        """
        number = next(self._numbers)
        self._facts[number] = step, facts, kept
        return number

    def agree_by(self, agreement: Agreement) -> None:
        """Require agreement of all ranks on each commit, after it is durable on this rank."""
        self._agreement, self._manifest.agree = agreement, agreement.agreed

    @property
    def agrees(self) -> bool:
        """Whether ranks agree on commits, so that all decide alike whether there is one."""
        return self._agreement is not None

    @property
    def pin(self) -> Identity | None:
        """The pin that readers hold on the last commit, if any; see Note [Pinned commits].

        ``None`` with several ranks, which could not all decide alike.
        """
        return None if self.agrees else pin_of(self._manifest.path.parent)

    def ends(self) -> None:
        """Stop waiting long for the other ranks: only the last commits follow."""
        if self._agreement is not None:
            self._agreement.ends()

    @property
    def folder(self) -> str | None:
        """The store's directories as a ``repr`` for messages; ``None`` before the first commit."""
        if self.last is None:
            return None
        found = [str(each) for each in self._io.owned_directories]
        return repr(found[0] if len(found) == 1 else found)

    @property
    def stopped(self) -> bool:
        """Whether commits have stopped because an earlier one's data could not be made durable."""
        return self._error is not None

    def put(self, work: Commit, done: Ended) -> None:
        """Queue a commit; ``done`` is called with its error, if any."""
        self._jobs.put((partial(self._commit, work), done))

    def check(self, work: Write, memory: NDArray[np.uint8], name: str, done: Ended) -> None:
        """Queue a comparison of saved weights with what was written to disk.

        See Note [Weights that change while they are saved].

        Args:
            work: the write, which has ended.
            memory: the weights now.
            name: the unit, for messages.
            done: called with the error, if any.
        """
        self._jobs.put((partial(self._compare, work, memory, name), done))

    def sound(self, work: Write) -> None:
        """Clear the record of an extent: it was written from memory that users cannot change."""
        self._doubted.pop((work.item, work.role), None)

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            job, done = queued
            try:
                job()
            except BaseException as error:
                done(error)
            else:
                done(None)
            del job, done, queued

    def _commit(self, work: Commit) -> None:
        number, table = work.number, work.table
        started = time.perf_counter_ns()
        step, facts, kept = self._facts[number]
        for old in [each for each in list(self._facts) if each <= number - _LONGEST]:
            del self._facts[old]  # includes cuts that were never committed
        self._flush(table)
        roles = [role for _, role in table]
        sums = [
            None if role < 0 else self._io.checksums(self._extents.of(item, role))
            for item, role in table
        ]
        self._manifest.commit(step, roles, sums, facts, kept=kept)
        self.last = facts
        self._trace.add("write", "commit", started, time.perf_counter_ns(), 0)

    def _flush(self, table: tuple[tuple[Key, int], ...]) -> None:
        """Make the data of a commit durable before its record is begun.

        Raises:
            OffloadError: this failed, or weights were changed while they were saved. Either may
                have happened in an earlier commit: after a failed flush, a later one may succeed
                although data was lost.
        """
        if self._error is not None:
            raise self._error
        try:
            self._io.flush()
            self._manifest.require_place()
            for each in table:
                if each in self._doubted:
                    raise WeightError(
                        f"weights of {self._doubted[each]!r} were changed in place, in forward or "
                        "between forward and step(), while a commit saved them; change them "
                        "between step() and the next forward, or inside `with "
                        "overspill.materialized(model, writeback=True)`"
                    )
        except OffloadError as error:
            self._error = error
            raise

    def _compare(self, work: Write, memory: NDArray[np.uint8], name: str) -> None:
        saved = work.item, work.role
        if self._io.holds(self._extents.of(*saved), memory):
            self._doubted.pop(saved, None)
        else:
            self._doubted[saved] = name

    def close(self) -> None:
        """Finish the queued work, end the thread and close the manifest."""
        self._jobs.put(None)
        self._thread.join()
        self._manifest.close()
