"""What other threads tell the pump and ask it for, and who waits for an answer."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..errors import OffloadError
from ..facts.trace import Trace
from ..io_engine.one_shot_event import OneShotEvent
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.messages import (
    AwaitUpdate,
    Done,
    Freed,
    GradientStored,
    GradLost,
    GradReady,
    GradRoom,
    Grant,
    Held,
    Need,
    Release,
    Signal,
)
from .compute_use import ComputeUse
from .health import Health
from .saved import End
from .waiters import LANES, Waiter


class EnginePort:
    """The pump's queue, and what was granted through it and not released.

    An exception may come to whoever asks, at whatever line: what he is granted afterwards goes
    back, and every grant is counted once.

    Attributes:
        queue: read by the pump; ``None`` ends it, a ``OneShotEvent`` is set when all before it has
            been handled.
        lock: of the machine, and of what the pump keeps here; the pump holds it as it calls what
            is for the pump.
    """

    def __init__(
        self,
        layout: Layout,
        health: Health,
        compute: ComputeUse,
        trace: Trace,
        before_asking: Callable[[], Iterable[Freed]],
    ) -> None:
        """
        Args:
            before_asking: called by whoever is about to wait; raises if he must not, and tells of
                what became free.
        """
        self._layout, self._health, self._compute, self._trace = layout, health, compute, trace
        self._before_asking = before_asking
        self.queue: queue.SimpleQueue[Signal | Waiter | OneShotEvent | End | None] = (
            queue.SimpleQueue()
        )
        self.lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiters: dict[int, Waiter] = {}  # by ticket; the pump's
        self._asked: dict[int, Waiter] = {}  # training's; several only where it was interrupted
        self._pins = [0] * len(layout.units)  # granted and not released; the pump's
        self._released: deque[None] = deque()  # one for each release on its way to the pump
        # By unit, whether gradients may be gathered where they are kept, and how often they were.
        self._at_home = [home.grads is layout.compute_tier for home in layout.homes]
        self._gathered = [0] * len(layout.units)
        self._lane: str | None = None  # of the work that the pump just heard the end of
        brings = "copy_in" if layout.has_device else "read"
        self._usual_lane = "update" if layout.trains else brings

    # -- for the other threads ------------------------------------------------------------------

    def tell(self, signal: Signal) -> None:
        """Puts a signal into the queue and goes on."""
        self._health.check()
        if isinstance(signal, Release):
            self._put_release(signal)
        else:
            self.queue.put(signal)

    def release(self, unit: int, held: tuple[Held, ...] = ()) -> None:
        """Compute lets go of what a ``Need`` was granted for; see ``Release``."""
        self._put_release(Release(unit, held))

    def _put_release(self, signal: Release) -> None:
        # Counted and sent, or neither: C makes both calls, and no signal handler runs in between.
        both = partial(self._released.append, None), partial(self.queue.put, signal)
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
        handled = OneShotEvent()
        self.queue.put(handled)
        if not self._health.closed:  # else nobody reads the queue
            handled.wait()

    def ask(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant:
        """Sends the signal that ``make`` builds from a ticket; returns when it is granted.

        ``computing`` names the part of the model that the calling thread then goes on with.

        Raises:
            OffloadError: the engine failed; its cause is attached.
        """
        self._health.check()
        for freed in self._before_asking():
            if self._layout.has_device:
                # Kernels that read it through the graph may still run.
                self._compute.mark(freed.held.place)
            self.queue.put(freed)
        self._close_asked()
        ticket = next(self._tickets)
        waiter = Waiter(ticket, make(ticket), self._usual_lane)
        self._asked[ticket] = waiter
        before = self._trace.compute_waits()
        started_ns = time.perf_counter_ns()
        try:
            self.queue.put(waiter)
            if self._health.closed:  # nobody may read the queue any more
                self._health.check()
            waiter.event.wait()
        except BaseException:
            self._abandon(waiter)
            raise
        self._asked.pop(ticket, None)
        if before is not None or computing is not None:
            self._compute.waited(waiter.lane, started_ns, computing or before or "")
        if waiter.error is not None:
            error, waiter.error = waiter.error, None
            try:
                self._health.raise_to_asker(error)
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
        waiter = Waiter(ticket, AwaitUpdate(unit, ticket), self._usual_lane)
        self.queue.put(waiter)
        if self._health.ended:  # nobody may answer any more
            raise _over(self._health.error) from self._health.error
        waiter.event.wait()
        if waiter.error is not None:
            raise _over(waiter.error) from waiter.error

    def gradient_home(self, unit: int, told: int) -> Place | None:
        """Where the unit's gradients are gathered, if no room has to be asked for: they are kept
        there, and all ``GradReady`` about them (so many were told) have been dealt with."""
        self._health.check()
        with self.lock:
            free = self._at_home[unit] and self._gathered[unit] == told
        return self._layout.homes[unit].grad_place if free else None

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

    def _abandon(self, waiter: Waiter) -> None:
        """The waiting thread was interrupted: what it is granted later goes straight back."""
        with self.lock:
            waiter.abandoned = True
            granted = waiter.event.is_set() and waiter.error is None
        if granted:
            self._take_back(waiter)

    def _take_back(self, waiter: Waiter) -> None:
        """Nobody is there to use what was granted."""
        if isinstance(waiter.signal, Need):
            self.release(waiter.signal.unit)
        elif isinstance(waiter.signal, GradRoom):
            self.queue.put(GradLost(waiter.signal.unit))

    # -- for the pump ---------------------------------------------------------------------------

    def heard(self, told: Signal | Waiter) -> Signal:
        """What the pump has just read; returns the signal itself."""
        if isinstance(told, Waiter):
            self._waiters[told.ticket] = told
            signal = told.signal
        else:
            signal = told
        self._lane = LANES[type(signal.work)] if isinstance(signal, Done) else None
        return signal

    def count(self, signal: Signal) -> None:
        """Counts what was released, and gathered."""
        if isinstance(signal, Release):
            self._pins[signal.unit] -= 1
            self._released.popleft()
        elif isinstance(signal, GradReady):
            self._gathered[signal.unit] += 1

    def at_home(self, word: GradientStored) -> None:
        """The machine's word on where a unit's gradients may be gathered."""
        self._at_home[word.unit] = word.free

    def answer(self, ticket: int, grant: Grant | None, error: BaseException | None) -> None:
        """Wakes whoever waits for a ticket."""
        waiter = self._waiters.pop(ticket)
        waiter.grant, waiter.error = grant, error
        waiter.lane = self._lane or waiter.lane
        if error is None:
            if isinstance(waiter.signal, Need):
                self._pins[waiter.signal.unit] += 1
            if waiter.abandoned:
                self._take_back(waiter)
        waiter.event.set()

    def wake_all(self) -> None:
        """Nothing more is granted.  Whoever waits is woken, whether the machine has heard of his
        signal or not: it may have failed while it took it, or before it said what it grants."""
        for ticket in list(self._waiters):
            self.answer(ticket, None, self._health.error)

    def close(self) -> None:
        """Nobody reads the queue any more: wakes whoever waits yet."""
        for waiter in [*self._waiters.values(), *self._asked.values()]:
            waiter.error = OffloadError("the engine was closed")
            waiter.event.set()


def _over(error: BaseException | None) -> OffloadError:
    """For whoever does not train: the training thread alone is told the error itself."""
    why = "" if error is None else f": {error}"
    return OffloadError(f"the engine has ended{why}")
