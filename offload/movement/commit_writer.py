"""Carries commits out: flushes the data, then writes the record, on a thread of its own."""

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

from ..errors import OffloadError
from ..facts.trace import Trace
from ..io_engine import IoEngine
from ..io_engine.manifest import Manifest
from ..io_engine.pins import Identity, pin_of
from ..schedule.messages import Commit, Key, Write
from .extents import Extents

_LONGEST = 16  # facts that are kept for cuts which may still be asked for


class Agreement(Protocol):
    """With whom a commit is agreed on."""

    def agreed(self, number: int, step: int) -> None:
        """Returns when all have it, of that number."""

    def ends(self) -> None:
        """This one will not wait for long any more."""


Ended = Callable[[BaseException | None], None]


class CommitWriter:
    """Owns the thread.  ``seal`` hands in the facts of a cut before the machine may ask for it.

    No lock guards the facts: a signal handler may call ``commit()`` while its thread has it.
    """

    def __init__(self, io: IoEngine, manifest: Manifest, extents: Extents, trace: Trace) -> None:
        self._io, self._manifest, self._extents, self._trace = io, manifest, extents, trace
        self._numbers = itertools.count(1)
        self._facts: dict[int, tuple[int, bytes, bool]] = {}
        self._doubted: dict[tuple[Key, int], str] = {}  # saved items that changed meanwhile
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Ended] | None] = queue.SimpleQueue()
        self._agreement: Agreement | None = None
        self.last: bytes | None = None  # the facts of the last commit
        self._error: OffloadError | None = None  # why data of a commit could not be made durable
        self._thread = threading.Thread(target=self._run, name="overspill-commit", daemon=True)
        self._thread.start()

    def seal(self, step: int, facts: bytes, kept: bool) -> int:
        """Keeps the facts of a cut, and returns the number that the commit is to name.

        ``kept``: no new store is to take its place.
        """
        number = next(self._numbers)
        self._facts[number] = step, facts, kept
        return number

    def agree_by(self, agreement: Agreement) -> None:
        """A commit counts once it was agreed on, after it is durable here."""
        self._agreement, self._manifest.agree = agreement, agreement.agreed

    @property
    def agrees(self) -> bool:
        """Whether commits are agreed on: then all decide alike whether there is one."""
        return self._agreement is not None

    @property
    def pin(self) -> Identity | None:
        """The pin of readers of the last commit, if any; see Note [Pinned commits].  ``None`` with
        several ranks, which could not all decide alike."""
        return None if self.agrees else pin_of(self._manifest.path.parent)

    def ends(self) -> None:
        """What is committed from now on are the last ones."""
        if self._agreement is not None:
            self._agreement.ends()

    @property
    def folder(self) -> str | None:
        """``repr`` of the store's directories, for messages; ``None`` without a commit."""
        if self.last is None:
            return None
        found = [str(each) for each in self._io.owned_directories]
        return repr(found[0] if len(found) == 1 else found)

    @property
    def stopped(self) -> bool:
        """Whether commits have stopped because an earlier one's data could not be made durable."""
        return self._error is not None

    def put(self, work: Commit, done: Ended) -> None:
        """Queues a commit; ``done`` is called with its error, if any."""
        self._jobs.put((partial(self._commit, work), done))

    def check(self, work: Write, memory: NDArray[np.uint8], name: str, done: Ended) -> None:
        """Queues a look whether weights that a commit has saved are still what was written, of
        which the disk has a copy: while they show, anybody may change them, and that copy may be
        neither old nor new.  That fails a commit which has it; an edit that is taken before then is
        written in its place."""
        self._jobs.put((partial(self._compare, work, memory, name), done))

    def sound(self, work: Write) -> None:
        """What nobody could change meanwhile was written."""
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
            del self._facts[old]  # of cuts that were never made too
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
            OffloadError: this failed, or weights were changed while they were saved, now or for an
                earlier commit: after a failed flush a later one may succeed although data were
                lost.
        """
        if self._error is not None:
            raise self._error
        try:
            self._io.flush()
            self._manifest.require_place()
            for each in table:
                if each in self._doubted:
                    raise OffloadError(
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
        """Ends the thread after what is queued, and closes the manifest."""
        self._jobs.put(None)
        self._thread.join()
        self._manifest.close()
