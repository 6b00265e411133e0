"""Carries the machine's instructions out, and feeds the results back as signals.

One pump thread calls the machine; everybody else puts signals into its queue, or only looks.  Moves
end on threads of the I/O engine and of the accelerator, updates on the update worker; each puts
``Done`` or ``Failed`` back.  After a failure the machine drains, whoever waits is woken with the
error, and later calls are refused.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..errors import BudgetError, OffloadError
from ..facts.trace import Trace
from ..io_engine.once import Once
from ..schedule.arena import Place
from ..schedule.invariants import validate
from ..schedule.layout import Layout
from ..schedule.ledger import Ledger
from ..schedule.messages import (
    Accumulate,
    AtHome,
    CatchUp,
    Clear,
    Commit,
    Done,
    Failed,
    Forget,
    Freed,
    GradLost,
    GradReady,
    GradRoom,
    Grant,
    Held,
    Instruction,
    Judged,
    LetGo,
    Need,
    Refuse,
    Release,
    Signal,
    Update,
    Work,
    Write,
)
from ..schedule.protocol import Protocol
from ..schedule.residency import Residency
from .accelerators.base import Accelerator, Event
from .commit_writer import CommitWriter
from .disk import Disk
from .events import RangeEvents
from .extents import Extents
from .moves import Mover, Transfer
from .pools import Arenas
from .refusals import refusal
from .saved import End, SavedStore
from .update_lane import UpdateLane, UpdateWork, is_on_device
from .visits import RecordParts, Visits
from .waiters import LANES, Waiter


class Executor:
    """The moving part around the machine.

    Args:
        work_on: runs updates and merges on the worker, and says whether what they gave is finite.
        visit: where the parts of an update live that go to the device for it, and where they are
            there.
        ledger: told of every signal, on the pump's thread, before anything is decided about it.
        before_asking: called by whoever is about to wait; raises if he must not, and tells of
            what became free.
        commits: makes cuts durable.
        saved_changed: told how many bytes of what autograd saved compute has, and disks.
    """

    def __init__(
        self,
        layout: Layout,
        arenas: Arenas,
        accelerator: Accelerator,
        disk: Disk | None,
        extents: Extents,
        trace: Trace,
        work_on: Callable[[UpdateWork], bool],
        visit: Callable[[Update], tuple[RecordParts, RecordParts]],
        ledger: Ledger,
        before_asking: Callable[[], Iterable[Freed]],
        *,
        check: bool,
        commits: CommitWriter | None = None,
        saved_changed: Callable[[int, int], None] = lambda compute, disk: None,
    ) -> None:
        self.layout, self.arenas, self.accelerator = layout, arenas, accelerator
        self._machine = Residency(layout)
        self.protocol = Protocol(layout, self.request, self.tell, ledger.landed)
        self._trace, self._check, self._commits = trace, check, commits
        self._ledger, self._before_asking = ledger, before_asking
        self.waited_ns = 0  # by compute, in all
        self._queue: queue.SimpleQueue[Signal | Waiter | Once | End | None]
        self._queue = queue.SimpleQueue()
        self._tickets = itertools.count()
        self._waiters: dict[int, Waiter] = {}  # by ticket; the pump's
        self._asked: dict[int, Waiter] = {}  # training's; several only where it was interrupted
        self._lock = threading.Lock()  # of the machine, and of what the pump keeps
        self._started = 0  # and not finished; the pump's
        self._pins = [0] * len(layout.units)  # granted and not released; the pump's
        self._released: deque[None] = deque()  # one for each release on its way to the pump
        # By unit, whether gradients may be gathered where they are kept, and how often they were.
        self._at_home = [home.grads is layout.compute_tier for home in layout.homes]
        self._gathered = [0] * len(layout.units)
        # The machine, or what carries out its word, has failed: it is asked no more.
        self._drains = False
        self._error: BaseException | None = None
        self._raised = False
        self._drained: Once | None = None  # of ``close``: nothing is under way any more
        self._closed = False
        self._closer: int | None = None  # the thread that closes it
        self._owner = os.getpid()
        self._lane: str | None = None
        brings = "copy_in" if layout.has_device else "read"
        self._usual_lane = "update" if layout.trains else brings
        self._events = RangeEvents()
        self.saved = SavedStore(self._queue.put, self.request, saved_changed)
        self._mover = Mover(
            layout, arenas, accelerator, disk, extents, self._events, trace, self.saved, self._moved
        )
        make_lane = partial(
            UpdateLane, layout, arenas, accelerator, self._events, trace, work_on,
            lambda unit: self._queue.put(Judged(unit, finite=False)), self._worked,
        )  # fmt: skip
        self._here = self._there = make_lane("update")
        if accelerator.device.type != "cpu" or accelerator.limits.device_update_params_s:
            self._there = make_lane("update-there")  # not one after the other
        self._visits = Visits(
            arenas, accelerator, self._events, trace, visit,
            lambda update: layout.units[update.unit].name, self._there.put, self._finished,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._pump, name="overspill-pump", daemon=True)
        self._thread.start()

    # -- for the other threads ------------------------------------------------------------------

    def tell(self, signal: Signal) -> None:
        """Puts a signal into the queue and goes on."""
        self.raise_failure()
        if isinstance(signal, Release):
            self._put_release(signal)
        else:
            self._queue.put(signal)

    def release(self, unit: int, held: tuple[Held, ...] = ()) -> None:
        """Compute lets go of what a ``Need`` was granted for; see ``Release``."""
        self._put_release(Release(unit, held))

    def _put_release(self, signal: Release) -> None:
        # Counted and sent, or neither: C makes both calls, and no signal handler runs in between.
        both = partial(self._released.append, None), partial(self._queue.put, signal)
        tuple(map(partial.__call__, both))

    @property
    def granted(self) -> int:
        """How many units were granted, or asked for, that are not released yet."""
        # What is told of, and not yet heard of by the pump, is over for those who ask.
        return sum(self._pins) - len(self._released) + len(self._asked)

    def lost(self, uses: Sequence[int]) -> list[int]:
        """The units that were granted, once for every time, and are in nobody's use: an exception
        came in between.

        ``uses``: by unit, whether compute uses it.
        """
        self._close_asked()
        if not self.granted:
            return []
        self.catch_up()
        return [
            unit
            for unit, (pins, used) in enumerate(zip(self._pins, uses, strict=True))
            for _ in range(pins - min(used, 1))
        ]

    def catch_up(self) -> None:
        """Blocks until the machine has dealt with all that was told before."""
        handled = Once()
        self._queue.put(handled)
        if not self._closed:  # else nobody reads the queue
            handled.wait()

    def request(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant:
        """Sends the signal that ``make`` builds from a ticket; returns when it is granted.

        ``computing`` names the part of the model that the calling thread then goes on with.

        Raises:
            OffloadError: the engine failed; its cause is attached.
        """
        self.raise_failure()
        for freed in self._before_asking():
            if self.accelerator.has_device_memory:
                # Kernels that read it through the graph may still run.
                self.mark_device_use(freed.held.place, self.accelerator.record())
            self._queue.put(freed)
        self._close_asked()
        ticket = next(self._tickets)
        waiter = Waiter(ticket, make(ticket), self._usual_lane)
        self._asked[ticket] = waiter
        before = self._trace.compute_waits()
        started_ns = time.perf_counter_ns()
        try:
            self._queue.put(waiter)
            if self._closed:  # nobody may read the queue any more
                self.raise_failure()
            waiter.event.wait()
        except BaseException:
            self._abandon(waiter)
            raise
        self._asked.pop(ticket, None)
        if before is not None or computing is not None:
            self._waited(waiter.lane, started_ns, computing or before or "")
        if waiter.error is not None:
            error, waiter.error = waiter.error, None
            try:
                self._raise(error)
            finally:  # else what the frames around hold would live until the collector comes
                del error
        assert waiter.grant is not None
        return waiter.grant

    def await_update(self, unit: int) -> None:
        """Blocks a thread that does not train until the last step's update of a unit is over.

        Raises:
            OffloadError: the engine has failed, or was closed.
        """
        ticket = next(self._tickets)
        waiter = Waiter(ticket, CatchUp(unit, ticket), self._usual_lane)
        self._queue.put(waiter)
        if self._closed or self._error is not None:  # nobody may answer any more
            raise OffloadError("the engine has ended") from self._error
        waiter.event.wait()
        if waiter.error is not None:
            raise OffloadError("the engine has ended") from waiter.error

    def _close_asked(self) -> None:
        """Waits for the answers to requests that were interrupted: what they are granted later
        would stand in the way of what is asked for now.  Those of a thread that waits are its."""
        me = threading.get_ident()
        if over := [w for w in list(self._asked.values()) if w.abandoned or w.asker == me]:
            self.catch_up()  # the pump then knows of all that were sent
            for waiter in over:
                if waiter.ticket in self._waiters:
                    waiter.event.wait()
                self._asked.pop(waiter.ticket, None)
            self.catch_up()  # and of what went back

    def gradient_home(self, unit: int, told: int) -> Place | None:
        """Where the unit's gradients are gathered, if no room has to be asked for: they are kept
        there, and all ``GradReady`` about them (so many were told) have been dealt with."""
        self.raise_failure()
        with self._lock:
            free = self._at_home[unit] and self._gathered[unit] == told
        return self.layout.homes[unit].grad_place if free else None

    def _abandon(self, waiter: Waiter) -> None:
        """The waiting thread was interrupted: what it is granted later goes straight back."""
        with self._lock:
            waiter.abandoned = True
            granted = waiter.event.is_set() and waiter.error is None
        if granted:
            self._take_back(waiter)

    def _take_back(self, waiter: Waiter) -> None:
        """Nobody is there to use what was granted."""
        if isinstance(waiter.signal, Need):
            self.release(waiter.signal.unit)
        elif isinstance(waiter.signal, GradRoom):
            self._queue.put(GradLost(waiter.signal.unit))

    def raise_failure(self) -> None:
        """Raises what failed in the background: once with its cause, then as a refusal."""
        if os.getpid() != self._owner:
            raise OffloadError(
                "this process was forked from the one that wrapped the model, and has neither its "
                "threads nor its files; use the model in the parent, or wrap one here"
            )
        if self._closed:
            raise OffloadError(
                "the engine is closed, and the weights with it; call overspill.unwrap(model) "
                "before close() to keep them, or build the model again"
            )
        if self._closer not in (None, threading.get_ident()):
            raise OffloadError("the engine is being closed by another thread, or a signal handler")
        if self._error is not None:
            self._raise(self._error)

    def closes(self) -> None:
        """The calling thread will close the engine: all others are refused."""
        self._closer = threading.get_ident()

    def _raise(self, error: BaseException) -> None:
        try:
            if isinstance(error, BudgetError) and self._error is None:
                raise error
            if self._raised:
                raise OffloadError(
                    "the engine stopped after an earlier error; close it, and build the model again"
                ) from error
            self._raised = True
            if isinstance(error, OffloadError):
                raise error
            raise OffloadError(f"{type(error).__name__} in the background: {error}") from error
        finally:  # an error that its own frame names lives until the collector comes
            del error

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def ended(self) -> bool:
        """Whether it failed or was closed."""
        return self._closed or self.failed

    # -- the pump -------------------------------------------------------------------------------

    def _pump(self) -> None:
        while (told := self._queue.get()) is not None:
            if isinstance(told, Once):  # somebody waits for all that was put before
                told.set()
            else:
                heard = self.saved.has_ended(told) if isinstance(told, End) else told
                if heard is not None:
                    with self._lock:
                        self._hear(heard)
            if self._drained is not None and not self._started and self._queue.empty():
                self._drained.set()

    def _hear(self, told: Signal | Waiter) -> None:
        if isinstance(told, Waiter):
            self._waiters[told.ticket] = told
        signal = told.signal if isinstance(told, Waiter) else told
        self._lane = LANES[type(signal.work)] if isinstance(signal, Done) else None
        self._started -= isinstance(signal, (Done, Failed))
        try:
            self._take(signal)
        except BaseException as error:
            if self._error is None:
                self._error = error
            self._drains = True
        if self._error is not None:
            self._wake_all()

    def _take(self, signal: Signal) -> None:
        if self._error is None:
            self._ledger.told(signal)
            self.protocol.told(signal)
        if isinstance(signal, Release):
            self._pins[signal.unit] -= 1
            self._released.popleft()
        elif isinstance(signal, GradReady):
            self._gathered[signal.unit] += 1
        if self._drains:
            return
        instructions = self._machine.handle(signal)
        if self._check and self._error is None and not isinstance(signal, Failed):
            validate(self._machine)
        saved = self._machine.saved_bytes()
        self._trace.level(time.perf_counter_ns(), *self._machine.used_bytes(), saved[0])
        self.saved.counted(*saved)
        for instruction in instructions:
            self._carry_out(instruction)

    def _wake_all(self) -> None:
        """Nothing more is granted.  Whoever waits is woken, whether the machine has heard of his
        signal or not: it may have failed while it took it, or before it said what it grants."""
        for ticket in list(self._waiters):
            self._answer(ticket, None, self._error)

    def _answer(self, ticket: int, grant: Grant | None, error: BaseException | None) -> None:
        waiter = self._waiters.pop(ticket)
        waiter.grant, waiter.error = grant, error
        waiter.lane = self._lane or waiter.lane
        if error is None:
            if isinstance(waiter.signal, Need):
                self._pins[waiter.signal.unit] += 1
            if waiter.abandoned:
                self._take_back(waiter)
        waiter.event.set()

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Grant):
            self._answer(instruction.ticket, instruction, None)
        elif isinstance(instruction, Refuse):
            self._answer(instruction.ticket, None, refusal(self.layout, instruction))
        elif isinstance(instruction, AtHome):
            self._at_home[instruction.unit] = instruction.free
        elif isinstance(instruction, LetGo):
            self.saved.let_go(instruction.item.number)
        elif isinstance(instruction, Forget):
            self._mover.forget(instruction.item)
        else:
            self._started += 1
            try:
                self._start(instruction)
            except BaseException as error:
                self._finished(instruction, error)

    def _start(self, work: Work) -> None:
        if isinstance(work, Update) and work.visit is not None:
            self._visits.start(work)
        elif isinstance(work, (Clear, Accumulate, Update)):
            (self._there if is_on_device(work) else self._here).put(work)
        elif isinstance(work, Commit):
            assert self._commits is not None
            self._commits.put(work, lambda error: self._finished(work, error))
        else:
            self._mover.start(work)

    def _worked(self, task: UpdateWork, error: BaseException | None) -> None:
        """An update lane is through with a task."""
        try:
            if error is None and isinstance(task, Update) and task.visit is not None:
                self._visits.back(task)
                return
        except BaseException as raised:
            error = raised
        self._finished(task, error)

    def _moved(self, work: Transfer, error: BaseException | None) -> None:
        """The mover is through with a move."""
        if error is None and isinstance(work, Write) and self._commits is not None:
            if self._mover.may_be_changed(work):
                name = self.layout.units[work.item.number].name
                memory = self.arenas.bytes_of(work.place).numpy()
                self._commits.check(work, memory, name, lambda wrong: self._finished(work, wrong))
                return
            self._commits.sound(work)
        self._finished(work, error)

    def _finished(self, work: Work, error: BaseException | None) -> None:
        if error is not None:
            if self._error is None:
                self._error = error
            self._queue.put(Failed(work))
        else:
            self._queue.put(Done(work))

    def mark_device_use(self, place: Place, event: Event) -> None:
        """Compute has used ``place`` up to ``event``; the next copy over it waits."""
        self._events.set(place, event)

    def wait_for(self, place: Place) -> None:
        """The calling thread's compute waits for what was last done with ``place``."""
        for event in self._events.over(place):
            self.accelerator.wait(event)

    def compute_waits_for(self, place: Place, lane: str) -> None:
        """``wait_for`` on the training thread: what blocks there is a wait of compute's."""
        self.compute_waits_on(self._events.over(place), lane)

    def compute_waits_on(self, events: Iterable[Event], lane: str) -> None:
        """Compute waits for events of ``lane``.  What is over already is no wait."""
        ahead = [event for event in events if not event.done()]
        if not ahead:
            return
        before = self._trace.compute_waits()
        started_ns = time.perf_counter_ns()
        for event in ahead:
            self.accelerator.wait(event)
        if before is not None:
            self._waited(lane, started_ns, before)

    def _waited(self, lane: str, started_ns: int, name: str) -> None:
        """Compute has waited until now, and goes on in the part of the model called ``name``."""
        self.waited_ns += time.perf_counter_ns() - started_ns
        self._trace.compute_waited(lane, name)

    def close(self) -> None:
        """Drains, ends both threads and joins them.  Never raises, never hangs on a failure."""
        if self._closed or os.getpid() != self._owner:
            return
        self._drained = drained = Once()
        self._queue.put(Once())  # so that the pump looks, if nothing else comes
        drained.wait(timeout=60)
        self._closed = True
        for lane in {self._here, self._there}:
            lane.close()
        self._queue.put(None)
        self._thread.join(timeout=60)
        for waiter in [*self._waiters.values(), *self._asked.values()]:
            waiter.error = OffloadError("the engine was closed")
            waiter.event.set()
