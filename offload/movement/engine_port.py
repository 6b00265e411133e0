"""The pump's queue: signals and requests from other threads, their waiters, and the answers."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..errors import BudgetError, LifecycleError
from ..facts.tier import Tier
from ..facts.trace import Trace
from ..io_engine.one_shot_event import OneShotEvent
from ..schedule.arena import Place
from ..schedule.layout import Layout
from ..schedule.messages import (
    Accumulate,
    AwaitUpdate,
    Clear,
    Commit,
    CopyIn,
    CopyOut,
    Done,
    Freed,
    GradientStored,
    GradLost,
    GradReady,
    GradRoom,
    Grant,
    Held,
    Kind,
    Need,
    Read,
    Refuse,
    Release,
    Signal,
    Update,
    Write,
)
from .compute_use import ComputeUse
from .health import Health
from .saved_storages import End

# The lane on which each kind of work runs, and which a thread waits for.
LANES: dict[type, str] = {
    Read: "read", Write: "write", CopyIn: "copy_in", CopyOut: "copy_out",
    Clear: "update", Accumulate: "update", Update: "update", Commit: "write",
}  # fmt: skip


class Waiter:
    """A request that waits for its grant.

    Attributes:
        asker: the thread that made the request.
        lane: the lane whose work it waited for last.
        abandoned: an exception ended the wait; the grant is to be returned.
    """

    __slots__ = ("abandoned", "asker", "error", "event", "grant", "lane", "signal", "ticket")

    def __init__(self, ticket: int, signal: Signal, lane: str) -> None:
        """
        Args:
            lane: the lane to name if no finished work ends the wait.
        """
        self.ticket, self.signal = ticket, signal
        self.asker = threading.get_ident()
        self.event = OneShotEvent()
        self.grant: Grant | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.lane = lane


def refusal(layout: Layout, refuse: Refuse) -> BudgetError:
    """Return the error for a request whose room no work in progress could free."""
    regions, tier, item = layout.regions, refuse.tier, refuse.item
    total = regions.device_bytes if tier is Tier.DEVICE else regions.host_bytes
    unit = item.kind is Kind.WEIGHTS
    if item.kind is Kind.SAVED:
        where = "" if refuse.unit < 0 else f" in unit {layout.units[refuse.unit].name!r}"
        named = "host" if tier is Tier.DEVICE and not layout.has_device else tier.value
        others = [repr(each) for each in ("auto", "recompute") if each != layout.saved.policy]
        remedy = (
            f"raise {named}_memory, use fewer tokens, or pass activations={' or '.join(others)}"
        )
        return BudgetError(
            f"what autograd keeps until backward (the activations){where}", named,
            refuse.need_bytes, refuse.have_bytes, refuse.have_bytes, remedy,
        )  # fmt: skip
    return BudgetError(
        f"unit {layout.units[item.number].name!r}" if unit else layout.name(item),
        tier.value, refuse.need_bytes, refuse.have_bytes, total,
        f"raise {tier.value}_memory, or free graphs that still hold weights",
    )  # fmt: skip


# Note [Interrupted requests]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# ``ask`` blocks the calling thread until the machine grants its request. A signal handler (Ctrl-C)
# can raise an exception in that thread at any line. The machine does not notice: it may grant the
# request later, or has just granted it. The grant of a ``Need`` pins a unit, so a grant that is
# lost would pin it for ever.
#
# - While ``ask`` waits, the waiter is in ``_asked``. If an exception ends the wait, ``_abandon``
#   marks the waiter, and ``answer`` then returns the grant at once (``_take_back``). If the grant
#   has come already, ``_abandon`` returns it. Both hold ``lock``, so exactly one of them does it.
# - If the exception comes before ``_abandon``, or before the waiter is queued, the waiter stays in
#   ``_asked``. The next request of that thread first calls ``_close_asked``, which waits for the
#   answers to such requests and removes them.
# - The exception may come after the grant, before the caller has recorded what it uses. ``lost``
#   finds such grants: units that are pinned (``_pins``) but that compute does not use.
# - ``_put_release`` counts a release and sends it, or does neither. One C function makes both
#   calls, and Python runs signal handlers only between bytecodes. So ``granted`` stays exact.


class EnginePort:
    """The pump's queue, the requests that wait for an answer, and the grants not released yet.

    An exception may interrupt a request at any line. What it is granted afterwards is returned, and
    every grant is counted once. See Note [Interrupted requests].

    Attributes:
        queue: read by the pump. ``None`` ends the pump. A ``OneShotEvent`` is set once everything
            queued before it has been handled.
        lock: guards the machine and the pump's fields here. The pump holds it while it calls the
            methods of the section "for the pump".
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
            before_asking: called by a thread that is about to wait. Raises if it must not wait, and
                returns what has become free.
        """
        self._layout, self._health, self._compute, self._trace = layout, health, compute, trace
        self._before_asking = before_asking
        self.queue: queue.SimpleQueue[Signal | Waiter | OneShotEvent | End | None] = (
            queue.SimpleQueue()
        )
        self.lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiters: dict[int, Waiter] = {}  # by ticket; written by the pump
        self._asked: dict[int, Waiter] = {}  # by ticket; several only after an interruption
        self._pins = [0] * len(layout.units)  # granted and not released; written by the pump
        self._released: deque[None] = deque()  # one for each release on its way to the pump
        # By unit: whether gradients may be gathered where they are kept, and how often they were.
        self._at_home = [home.grads is layout.compute_tier for home in layout.homes]
        self._gathered = [0] * len(layout.units)
        self._lane: str | None = None  # lane of the finished work that the pump handles now
        brings = "copy_in" if layout.has_device else "read"
        self._usual_lane = "update" if layout.trains else brings

    # -- for the other threads ------------------------------------------------------------------

    def tell(self, signal: Signal) -> None:
        """Queue a signal and return without waiting."""
        self._health.check()
        if isinstance(signal, Release):
            self._put_release(signal)
        else:
            self.queue.put(signal)

    def release(self, unit: int, held: tuple[Held, ...] = ()) -> None:
        """Release a unit that was granted for a ``Need``; see ``Release``."""
        self._put_release(Release(unit, held))

    def _put_release(self, signal: Release) -> None:
        # One C call makes both calls, so that no signal handler runs in between.
        both = partial(self._released.append, None), partial(self.queue.put, signal)
        tuple(map(partial.__call__, both))

    @property
    def granted(self) -> int:
        """The number of units that are granted or requested and not released yet."""
        # For callers, a release counts once it is queued, before the pump has handled it.
        return sum(self._pins) - len(self._released) + len(self._asked)

    def lost(self, uses: Sequence[int]) -> list[int]:
        """Return the units whose grants were lost to an exception, once for every such grant.

        See Note [Interrupted requests].

        Args:
            uses: by unit, whether compute uses it.
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
        """Block until the pump has handled everything queued before."""
        handled = OneShotEvent()
        self.queue.put(handled)
        if not self._health.closed:  # else the pump no longer reads the queue
            handled.wait()

    def ask(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant:
        """Send the signal that ``make`` builds from a ticket, and wait for its grant.

        Args:
            computing: the part of the model that the calling thread continues with afterwards.

        Raises:
            OffloadError: the engine failed; its cause is attached.
        """
        self._health.check()
        for freed in self._before_asking():
            if self._layout.has_device:
                # Kernels that read this memory through the graph may still run.
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
            if self._health.closed:  # the pump may no longer read the queue
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
            finally:  # else this cycle keeps the frames' objects alive until a garbage collection
                del error
        assert waiter.grant is not None
        return waiter.grant

    def await_update(self, unit: int) -> None:
        """Block a thread other than the training thread until a unit's update is over.

        This is the update of the last step.

        Raises:
            OffloadError: the engine has failed, or was closed.
        """
        ticket = next(self._tickets)
        waiter = Waiter(ticket, AwaitUpdate(unit, ticket), self._usual_lane)
        self.queue.put(waiter)
        if self._health.ended:  # the pump may no longer answer
            raise _over(self._health.error) from self._health.error
        waiter.event.wait()
        if waiter.error is not None:
            raise _over(waiter.error) from waiter.error

    def gradient_home(self, unit: int, told: int) -> Place | None:
        """Return where to gather the unit's gradients, if no room needs to be requested.

        That is so if they are kept there, and the pump has handled all ``told`` signals
        ``GradReady`` of this unit. Otherwise returns ``None``.
        """
        self._health.check()
        with self.lock:
            free = self._at_home[unit] and self._gathered[unit] == told
        return self._layout.homes[unit].grad_place if free else None

    def _close_asked(self) -> None:
        """Wait for the answers to interrupted requests of this thread, and to abandoned ones.

        Their late grants could block the next request. Requests on which another thread still waits
        stay. See Note [Interrupted requests].
        """
        me = threading.get_ident()
        if over := [w for w in list(self._asked.values()) if w.abandoned or w.asker == me]:
            self.catch_up()  # the pump has then read all requests that were sent
            for waiter in over:
                if waiter.ticket in self._waiters:
                    waiter.event.wait()
                self._asked.pop(waiter.ticket, None)
            self.catch_up()  # and the releases that followed

    def _abandon(self, waiter: Waiter) -> None:
        """Mark an interrupted request, so that its grant is returned; return one that has come."""
        with self.lock:
            waiter.abandoned = True
            granted = waiter.event.is_set() and waiter.error is None
        if granted:
            self._take_back(waiter)

    def _take_back(self, waiter: Waiter) -> None:
        """Return what was granted to an interrupted request."""
        if isinstance(waiter.signal, Need):
            self.release(waiter.signal.unit)
        elif isinstance(waiter.signal, GradRoom):
            self.queue.put(GradLost(waiter.signal.unit))

    # -- for the pump ---------------------------------------------------------------------------

    def heard(self, told: Signal | Waiter) -> Signal:
        """Note what the pump has just read from the queue, and return its signal."""
        if isinstance(told, Waiter):
            self._waiters[told.ticket] = told
            signal = told.signal
        else:
            signal = told
        self._lane = LANES[type(signal.work)] if isinstance(signal, Done) else None
        return signal

    def count(self, signal: Signal) -> None:
        """Count a release, or a unit whose gradients were gathered."""
        if isinstance(signal, Release):
            self._pins[signal.unit] -= 1
            self._released.popleft()
        elif isinstance(signal, GradReady):
            self._gathered[signal.unit] += 1

    def at_home(self, word: GradientStored) -> None:
        """Note whether a unit's gradients may be gathered where they are kept."""
        self._at_home[word.unit] = word.free

    def answer(self, ticket: int, grant: Grant | None, error: BaseException | None) -> None:
        """Answer the request of a ticket and wake its thread."""
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
        """Wake all waiting threads with the engine's error; nothing more is granted.

        This includes requests that the machine has not handled: it may have failed on them, or
        before it produced their grants.
        """
        for ticket in list(self._waiters):
            self.answer(ticket, None, self._health.error)

    def close(self) -> None:
        """Wake all threads that still wait, after the pump has stopped reading the queue."""
        for waiter in [*self._waiters.values(), *self._asked.values()]:
            waiter.error = LifecycleError("the engine was closed")
            waiter.event.set()


def _over(error: BaseException | None) -> LifecycleError:
    """Return the error for threads other than the training thread, which alone raises the cause."""
    why = "" if error is None else f": {error}"
    return LifecycleError(f"the engine has ended{why}")
