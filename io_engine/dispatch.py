"""Between callers and backend: order within an extent, tickets, and the thread that ends them.

Requests to one extent take effect in the order they were submitted: a read waits for the write
before it, a write for everything before it.  Requests to different extents know no order.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .backend import Backend, Completion, Outcome, Segment
from .buffers import TransferMemory
from .errors import CorruptionError, IoError, LifecycleError, OffloadError, remedy_for
from .extent_table import ExtentContents, Fill
from .store_file import StoreFile
from .types import Extent, Ticket


def error_of(completion: Completion, ticket: Ticket, paths: Sequence[str]) -> IoError | None:
    """The error of a request that has ended; ``None`` if it went well."""
    if completion.outcome == Outcome.DONE:
        return None
    if completion.outcome == Outcome.CANCELLED:
        return cancelled(ticket)
    path, offset, nbytes = paths[completion.lane], completion.offset, completion.nbytes
    where = f"{path}: {ticket.kind} of {nbytes} bytes at offset {offset}"
    if completion.outcome == Outcome.CORRUPT:
        return CorruptionError(
            f"{where}: CRC-32 expected {completion.expected:#010x}, found "
            f"{completion.found:#010x}: these are not the bytes that were written; the device or "
            "its driver loses data: go back to the last commit, on another device",
            path=path,
            offset=offset,
            nbytes=nbytes,
            expected=completion.expected,
            found=completion.found,
        )
    if completion.outcome == Outcome.TRUNCATED:
        return IoError(
            f"{where}: the file ends before; it was truncated while in use: nothing else may write "
            "to the store",
            path=path,
            offset=offset,
            nbytes=nbytes,
            errno=completion.error,
        )
    return IoError(
        f"{where}: {os.strerror(completion.error)}; {remedy_for(completion.error)}",
        path=path,
        offset=offset,
        nbytes=nbytes,
        errno=completion.error,
    )


def cancelled(ticket: Ticket) -> IoError:
    """The error of a request that was taken back."""
    return IoError(
        f"the {ticket.kind} of {ticket.extent} was cancelled before it started",
        nbytes=ticket.nbytes,
        errno=errno.ECANCELED,
    )


log = logging.getLogger("overspill.io_engine")

_TICK_S = 1.0


@dataclass(eq=False)
class Flight:
    """A request on its way.  ``memory`` keeps the caller's buffer alive until it has landed."""

    ticket: Ticket
    contents: ExtentContents
    segments: Sequence[Segment]
    urgent: bool
    memory: TransferMemory
    # A tail short of a whole sector goes through memory of our own: (ours, the caller's).
    tail: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
    id: int = 0
    submitted_ns: int = field(default_factory=time.perf_counter_ns)
    submitted: bool = False  # to the backend
    reported: bool = False  # as slow

    @property
    def write(self) -> bool:
        return self.ticket.kind == "write"


class _Line:
    """The requests that use one extent, and the requests waiting for it."""

    __slots__ = ("active", "waiting", "writing")

    def __init__(self) -> None:
        self.active: set[Flight] = set()
        self.writing = False
        self.waiting: deque[Flight] = deque()

    def admits(self, flight: Flight) -> bool:
        return not self.writing and not (flight.write and self.active)


class Dispatcher:
    """Owns the completion thread.  All state is behind one lock."""

    def __init__(self, backend: Backend, paths: Sequence[str], *, slow_after_s: float) -> None:
        self._backend, self._paths, self._slow_after_s = backend, paths, slow_after_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._flights: dict[int, Flight] = {}
        self._lines: dict[Extent, _Line] = {}
        self._refused: list[tuple[Flight, OffloadError]] = []
        self._unseen: list[Ticket] = []
        self._callback_errors: list[BaseException] = []
        self._next_id = 1
        self._ending = 0  # tickets taken out of flight whose on_done has not returned
        self.engine_port = self.failures = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="overspill-io", daemon=True)
        self._thread.start()

    # -- for callers ----------------------------------------------------------------------------

    def on_own_thread(self) -> bool:
        """Whether the caller is the thread that ends tickets."""
        return threading.current_thread() is self._thread

    def submit(self, flight: Flight) -> None:
        """Takes a request on its way, now or when those before it at the extent have ended."""
        with self._lock:
            if self._stopped:
                raise LifecycleError("the I/O engine is closed; open a new one")
            flight.id = self._next_id
            self._next_id += 1
            self.engine_port += 1
            self._flights[flight.id] = flight
            line = self._lines.setdefault(flight.ticket.extent, _Line())
            if line.waiting or not line.admits(flight):
                line.waiting.append(flight)
                if flight.urgent:
                    self._hurry_line(line)
            else:
                self._start(line, flight)

    def busy_with(self, extent: Extent) -> bool:
        """Whether a request to ``extent`` has not ended."""
        with self._lock:
            return extent in self._lines

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            flight = self._find(ticket)
            if flight is None:
                return False
            if flight.submitted:
                return self._backend.cancel(flight.id)
            line = self._lines[ticket.extent]
            if flight not in line.waiting:
                return False
            line.waiting.remove(flight)
            self._refuse(flight, cancelled(ticket))
            self._admit(ticket.extent, line)
        self._backend.wake()
        return True

    def hurry(self, ticket: Ticket) -> None:
        with self._lock:
            flight = self._find(ticket)
            if flight is not None:
                flight.urgent = True
                self._hurry_line(self._lines[ticket.extent])

    def wait_all(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            OffloadError: the first failure since the last call that was not raised by a ``wait``
                and not passed to an ``on_done``.
            Exception: what an ``on_done`` raised.
        """
        if self.on_own_thread():
            raise RuntimeError("wait_all() inside on_done would wait for itself for ever")
        with self._lock:  # Condition's own `with` may be interrupted, and leave it locked
            self._changed.wait_for(lambda: not self._flights and not self._ending)
            callbacks, self._callback_errors = self._callback_errors, []
        for error in self._take_unseen():
            raise error
        for callback_error in callbacks:
            raise callback_error

    def close(self, timeout_s: float) -> bool:
        """Lets everything end, then stops backend and thread.  False: threads are stuck."""
        if self.on_own_thread():
            raise RuntimeError("close() inside on_done would wait for itself for ever")
        drained = self._drain(timeout_s)
        with self._lock:
            already, self._stopped = self._stopped, True
        if already:
            return True
        ended = self._backend.close(timeout_s if drained else 0.0)
        if not drained:
            self._abandon(timeout_s)
        self._backend.wake()
        self._thread.join()
        for error in self._take_unseen():
            log.error("a transfer failed, and nobody has asked for its result: %s", error)
        return ended

    # -- under the lock -------------------------------------------------------------------------

    def _find(self, ticket: Ticket) -> Flight | None:
        return next((f for f in self._flights.values() if f.ticket is ticket), None)

    def _start(self, line: _Line, flight: Flight) -> None:
        line.active.add(flight)
        line.writing = flight.write
        if not flight.write and (reason := flight.contents.unreadable()) is not None:
            self._refuse(flight, reason)
            self._backend.wake()
            return
        try:
            self._backend.submit(flight.id, flight.write, flight.urgent, flight.segments)
        except Exception as error:
            self._refuse(flight, IoError(f"the {self._backend.name} backend refused: {error}"))
            self._backend.wake()
            return
        flight.submitted = True

    def _refuse(self, flight: Flight, error: OffloadError) -> None:
        """Ends it on the completion thread, where all tickets end."""
        self._refused.append((flight, error))

    def _leave(self, flight: Flight) -> None:
        """Takes it from its extent, and lets those in who waited for that."""
        line = self._lines.get(flight.ticket.extent)
        if line is None:
            return  # it was cancelled while it waited
        line.active.discard(flight)
        if not line.active:
            line.writing = False
        self._admit(flight.ticket.extent, line)

    def _admit(self, extent: Extent, line: _Line) -> None:
        while line.waiting and line.admits(line.waiting[0]):
            self._start(line, line.waiting.popleft())
        if not line.active and not line.waiting:
            self._lines.pop(extent, None)

    def _hurry_line(self, line: _Line) -> None:
        """Make all requests of an extent urgent, because an urgent one waits for them."""
        for flight in (*line.active, *line.waiting):
            flight.urgent = True
            if flight.submitted:
                self._backend.promote(flight.id)

    # -- the completion thread ------------------------------------------------------------------

    def _run(self) -> None:
        checked = time.monotonic()
        while True:
            completions = self._backend.collect(_TICK_S)
            self._end(completions)
            if time.monotonic() - checked >= _TICK_S:
                checked = time.monotonic()
                self._report_slow()
            with self._lock:
                if self._stopped and not self._flights and not self._refused:
                    return

    def _end(self, completions: Iterable[Completion]) -> None:
        ended: list[tuple[Flight, OffloadError | None, int, int]] = []
        with self._lock:
            for completion in completions:
                flight = self._flights.pop(completion.id, None)
                if flight is None:
                    continue  # given up by close()
                error: OffloadError | None = error_of(completion, flight.ticket, self._paths)
                self._note_contents(flight, completion, error)
                ended.append((flight, error, completion.started_ns, completion.finished_ns))
                self._leave(flight)
            while self._refused:
                flight, refusal = self._refused.pop()
                if self._flights.pop(flight.id, None) is not None:
                    ended.append((flight, refusal, 0, time.perf_counter_ns()))
                    self._leave(flight)
            self.failures += sum(error is not None for _, error, _, _ in ended)
            self._ending += len(ended)
        for flight, error, started_ns, finished_ns in ended:
            self._finish(flight, error, started_ns, finished_ns)
        if ended:
            with self._changed:
                self._ending -= len(ended)
                self._changed.notify_all()

    def _note_contents(
        self, flight: Flight, completion: Completion, error: OffloadError | None
    ) -> None:
        """Notes what the extent holds now."""
        if flight.write:
            if error is None:
                flight.contents.fill = Fill.WHOLE
            elif completion.outcome != Outcome.CANCELLED:
                flight.contents.fill, flight.contents.broken_by = Fill.BROKEN, str(error)
        elif error is None and flight.tail is not None:
            ours, theirs = flight.tail
            theirs[:] = ours[: theirs.nbytes]

    def _finish(
        self, flight: Flight, error: OffloadError | None, started_ns: int, finished_ns: int
    ) -> None:
        ticket = flight.ticket
        if error is not None and not ticket.has_listener:
            with self._lock:
                self._unseen.append(ticket)
        try:
            ticket.finish(error, started_ns, finished_ns)
        except BaseException as callback_error:
            log.exception("on_done of the %s of %s raised", ticket.kind, ticket.extent)
            with self._lock:
                self._callback_errors.append(callback_error)

    def _take_unseen(self) -> list[OffloadError]:
        with self._lock:
            tickets, self._unseen = self._unseen, []
        return [t.error for t in tickets if t.error is not None and not t.seen]

    def _report_slow(self) -> None:
        now = time.perf_counter_ns()
        with self._lock:
            slow = [
                flight
                for flight in self._flights.values()
                if not flight.reported and now - flight.submitted_ns > self._slow_after_s * 1e9
            ]
            in_flight = len(self._flights)
        for flight in slow:
            flight.reported = True
            log.warning(
                "slow disk: the %s of %s at %s has not ended after %.0f s; %d requests are in "
                "flight or queued",
                flight.ticket.kind,
                flight.ticket.extent,
                ", ".join(f"{self._paths[s.lane]}+{s.offset}" for s in flight.segments),
                (now - flight.submitted_ns) / 1e9,
                in_flight,
            )

    # -- closing --------------------------------------------------------------------------------

    def _drain(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight, as long as anything moves."""
        with self._lock:
            return self._drained(timeout_s)

    def _drained(self, timeout_s: float) -> bool:
        before: object = None
        while self._flights or self._ending:
            now = (len(self._flights), self._ending, self._moved())
            if now == before:
                return False
            before = now
            self._changed.wait(timeout_s)
        return True

    def _moved(self) -> int:
        return sum(s.bytes_read + s.bytes_written + s.retries for s in self._backend.stats())

    def _abandon(self, timeout_s: float) -> None:
        with self._lock:
            for flight in list(self._flights.values()):
                self._refuse(
                    flight,
                    IoError(
                        f"the {flight.ticket.kind} of {flight.ticket.extent} has not ended, and "
                        f"nothing has moved for {timeout_s:.0f} s; see the kernel log",
                        path=self._paths[flight.segments[0].lane],
                        offset=flight.segments[0].offset,
                        nbytes=flight.ticket.nbytes,
                    ),
                )


STUCK_AFTER_S = 30.0

log = logging.getLogger("overspill.io_engine")


def forget_memory(mover: Backend, address: int, nbytes: int, owner: int) -> None:
    """Memory that transfers have used is about to go."""
    if os.getpid() == owner:  # in a forked child the backend is its parent's
        mover.drop_memory(address, nbytes)


def shut_down(dispatcher: Dispatcher, files: Sequence[StoreFile], owner: int) -> None:
    """Ends the threads, and closes the files."""
    if os.getpid() != owner:
        return  # a forked child: threads, locks and files are its parent's
    ended = dispatcher.close(STUCK_AFTER_S)
    if not ended:
        log.error("transfers are stuck in the kernel; their threads and files are left to it")
    for file in files:
        file.close(keep_descriptor=not ended)
