"""The residency machine: signals in, instructions out.  Pure: no device, I/O, threads or clock.

It makes every decision about what is where.  Its driver (the executor's pump thread, or the
simulator) calls ``handle`` under one lock; there is no other way in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..facts.tier import Tier
from .activations import Activations
from .arena import Place
from .demands import Demands
from .gradient_policy import Gradients
from .items import Items
from .layout import Layout
from .messages import (
    AbortCommit,
    Accumulate,
    Adopt,
    Await,
    AwaitUpdate,
    BackwardPhase,
    Clear,
    Commit,
    CopyIn,
    CopyOut,
    Cut,
    Done,
    Edited,
    ExpertsRouted,
    Failed,
    Fetch,
    FiniteCheck,
    Freed,
    FreeDeviceCopy,
    FreeItem,
    GradientStored,
    GradLost,
    GradReady,
    GradRoom,
    Grant,
    Instruction,
    Key,
    Kind,
    Locate,
    Need,
    NotCommitted,
    Read,
    Refuse,
    Release,
    Repeat,
    Restored,
    Rollback,
    Saved,
    SavedDropped,
    Seal,
    Signal,
    Step,
    Until,
    Work,
    Write,
)
from .order import Order, Use
from .snapshots import Snapshots
from .update_queue import UNITS_AHEAD, DueUpdates
from .weights import Weights

# Note [Progress of the residency machine]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Each signal changes only the state of one part.  ``_advance`` then starts all work this allows, in
# this order: requests of compute, arrivals of gradients, updates, commits, prefetch.  A signal
# about saved storages advances only ``Activations``, since its room is separate from all others,
# and the rest only if no work is in progress.
#
# Work that finds no room stays queued and is tried again at the next signal.  A request that waits
# while work is in progress can still be met by a ``Done``.  If nothing is in progress, no signal
# would come, so the standstill is resolved at once.  ``Demands.unblock`` drops all unused copies,
# and refuses what still finds no room.  ``_refuse_all`` refuses all other waiting tickets.
#
# Two rules keep prefetch from delaying requests.  While a request of compute is blocked, nothing is
# prefetched: the machine must come to a standstill for ``unblock`` to act.  After ``QUIET`` was
# granted, nothing is prefetched until compute continues, because the caller edits the weights.
#
# After ``Failed`` the machine drops all waiting tickets and only accounts for work that ends.  The
# driver reports the failure to the callers that waited.


class Residency:
    """A state machine that decides what moves when: ``handle`` takes one signal.

    See Note [Progress of the residency machine].  Its public parts are for ``validate``, which
    checks all invariants.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._fixed_bytes = layout.regions.device_fixed, layout.regions.host_fixed
        self._order = _new_order(layout)
        self._out: list[Instruction] = []
        self.in_flight: dict[Work, int] = {}
        self.items = Items(layout, self._emit)
        self.weights = Weights(layout, self._order, self.items)
        self.gradients = Gradients(layout, self.weights.updating, self.items, self._emit)
        self.saved = Activations(layout, self.items, self._emit)
        self.snapshots = Snapshots(layout, self.items, self._emit)
        self.updates = DueUpdates(
            layout,
            self._order,
            self.items,
            self.weights,
            self.gradients,
            self.snapshots,
            self._emit,
        )
        self._demands = Demands(
            layout, self._order, self.items, self.weights, self.updates, self.in_flight, self._emit
        )
        self._step: Step | None = None
        self._waiting: dict[Until, list[int]] = {until: [] for until in Until}  # tickets
        self._cut: Cut | None = None
        self._sealed: int | None = None  # metadata number of the step whose updates still run
        self._failed = False
        # Nothing is prefetched from when ``QUIET`` is granted until compute continues.
        self._quiet = False
        self._takes: dict[type, Callable[[Any], None]] = {
            Need: self._demands.need,
            AwaitUpdate: self._demands.catch_up,
            Release: self._release,
            Freed: lambda s: self.weights.freed(s.held),
            GradRoom: self.gradients.room_wanted.append,
            GradReady: self._gathered,
            GradLost: lambda s: self.gradients.lost(s.unit),
            Step: self._begin_step,
            Repeat: lambda _: self._order.end_step(),
            ExpertsRouted: self._chosen,
            Saved: self.saved.saved,
            Fetch: self.saved.fetch,
            SavedDropped: self.saved.used,
            BackwardPhase: self.saved.turn,
            Await: lambda s: self._waiting[s.until].append(s.ticket),
            Seal: self._seal,
            Cut: self._wish_cut,
            FiniteCheck: self._judge,
            AbortCommit: lambda _: self.snapshots.take_back(),
            Rollback: self._roll_back,
            Restored: lambda _: self.snapshots.rolled_back(),
            Locate: self._locate,
            Edited: self._edited,
            Adopt: lambda s: self.snapshots.adopt(s.item, s.role),
            Done: lambda s: self._finish(s.work),
            Failed: self._fail,
            NotCommitted: self._not_committed,
        }

    def _emit(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (Grant, Refuse, GradientStored, FreeDeviceCopy, FreeItem)):
            self.in_flight[instruction] = self.in_flight.get(instruction, 0) + 1
        self._out.append(instruction)

    def handle(self, signal: Signal) -> list[Instruction]:
        """Process one signal and return the instructions that follow from it, in order."""
        take = self._takes.get(type(signal))
        if take is None:
            raise TypeError(f"not a signal: {signal!r}")
        if not self._failed or isinstance(signal, (Done, NotCommitted)):
            take(signal)
            self._quiet = self._quiet and not isinstance(signal, _GOES_ON)
        if not self._failed:
            # Saved storages have their own room, so neither side can unblock the other.
            saved = _about_saved(signal)
            if saved:
                self._advance_saved()
            if not saved or not self.in_flight:
                self._advance()
        out, self._out = self._out, []
        return out

    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes in use of (device, host) memory: homes, slots in the regions, and the
        ``BackwardPhase.beside`` bytes."""
        (device, host), (in_device, in_host) = self._fixed_bytes, self.items.used_bytes()
        beside = self.saved.beside_bytes
        there = beside if self.layout.has_device else 0
        return device + in_device + there, host + in_host + beside - there

    def occupied(self) -> list[Place]:
        """Return the places in the regions of memory that hold data, while nothing moves."""
        return self.items.occupied()

    def saved_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of saved storages at compute, offloaded, and on disk."""
        return self.saved.nbytes

    # -- compute --------------------------------------------------------------------------------

    def _release(self, signal: Release) -> None:
        for unit in self.layout.together[signal.unit]:
            self.weights.unpin(unit)
        for held in signal.held:
            self.weights.keep(held)

    def _chosen(self, signal: ExpertsRouted) -> None:
        self._order.expect(signal.among, signal.likely)
        if signal.now:
            self._order.come_to(signal.among)

    def _gathered(self, signal: GradReady) -> None:
        self.gradients.ready(signal)
        if signal.update:
            self.updates.add(signal.unit)

    def _begin_step(self, step: Step) -> None:
        """Queue the updates of a step in the order that ``DueUpdates.in_order`` chooses."""
        assert self._step is None, "one step at a time"
        self._order.end_step()
        self._sealed = None
        self._step, self.weights.drains = step, not step.background
        for unit in self.updates.in_order(step.units):
            self.updates.add(unit)
        if step.background:
            self._emit(Grant(step.ticket))

    def _end_step(self) -> None:
        """End the step after its updates and writes, and begin its snapshot if it commits."""
        step, self._step = self._step, None
        if step is not None:
            self.updates.end_step()
            self.weights.drains = False
            if step.commit and not self.snapshots.spoiled:
                self.snapshots.begin(self._sealed)
                self._sealed = None
            if not step.background:
                self._emit(Grant(step.ticket))
        self._grant(Until.LANDED)

    # -- commits and edits ----------------------------------------------------------------------

    def _seal(self, signal: Seal) -> None:
        if self.snapshots.pending and self.snapshots.sealed is None:
            self.snapshots.sealed = signal.number
        else:
            self._sealed = signal.number

    def _wish_cut(self, signal: Cut) -> None:
        if signal.always or self._step is not None or self.snapshots.newer():
            self._cut = signal

    def _judge(self, signal: FiniteCheck) -> None:
        if signal.finite:
            self.snapshots.spoiled.discard(signal.unit)
        else:
            self.snapshots.spoiled.add(signal.unit)

    def _roll_back(self, signal: Rollback) -> None:
        self._drop_caches()
        self._emit(Grant(signal.ticket, items=tuple(self.snapshots.rollback())))

    def _locate(self, signal: Locate) -> None:
        key, roles = signal.item, self.items.of(signal.item).roles
        _, place = self.layout.home(key)
        if place is None:  # unused room, which stays unused as long as nothing moves
            place = self.items.arena(key.kind, Tier.HOST).hole(self.layout.nbytes(key))
        if place is None:
            self.items.refuse(signal.ticket, key, Tier.HOST)
        else:
            self._emit(Grant(signal.ticket, (place,), (roles.newest, roles.target())))

    def _edited(self, signal: Edited) -> None:
        if signal.role is not None:
            self.items.of(signal.item).roles.newest = signal.role
        self.snapshots.change(signal.item)

    # -- ends -----------------------------------------------------------------------------------

    def _ended(self, work: Work) -> None:
        count = self.in_flight[work]
        if count == 1:
            del self.in_flight[work]
        else:
            self.in_flight[work] = count - 1

    def _finish(self, work: Work) -> None:
        self._ended(work)
        if self._failed:
            return
        if isinstance(work, (Read, Clear, Write, CopyIn, CopyOut)):
            self.items.ended(work)
            if isinstance(work, Write):
                if work.saves:
                    self.snapshots.saved(work.item)
                elif work.item.kind in (Kind.WEIGHTS, Kind.STATE):
                    self.updates.written()
        elif isinstance(work, Accumulate):
            self.gradients.accumulated(work.unit)
        elif isinstance(work, Commit):
            self.snapshots.committed()
        else:
            self.updates.update_done(work)

    def _not_committed(self, signal: NotCommitted) -> None:
        self._ended(signal.work)
        if not self._failed:
            self.snapshots.refused()

    def _fail(self, signal: Failed) -> None:
        """Begin to drain after a failure.  The driver reports it to all waiting callers."""
        self._failed = True
        self._forget_waiting()
        self.saved.forget_waiting()
        self._step = None

    # -- progress -------------------------------------------------------------------------------

    def _advance(self) -> None:
        self.snapshots.advance()  # first, since an update may wait for a snapshot's write
        self._demands.serve()
        self.gradients.advance()
        self.updates.advance()
        self._demands.answer_updated()
        self._demands.unblock()
        if self._waiting[Until.ARRIVED] and not self.gradients.moving:
            self._grant(Until.ARRIVED)
        lands = self._step or self._waiting[Until.LANDED]
        if lands and not self.updates.busy and self._may_land():
            self._end_step()
        self._commit()
        if self._waiting[Until.QUIET]:
            self._quieten()
        # Prefetch would keep work in progress, and ``unblock`` acts only when there is none.
        elif not self._demands.compute_waits and not self._quiet:
            self.updates.prefetch()
            self._prefetch()
        if not self.in_flight and self._somebody_waits:
            self._refuse_all()

    def _advance_saved(self) -> None:
        self.saved.advance()
        if not self._waiting[Until.QUIET]:
            self.saved.prefetch()
        if not self.saved.moving:
            self.saved.give_up()

    def _grant(self, until: Until) -> None:
        for ticket in self._waiting[until]:
            self._emit(Grant(ticket))
        self._waiting[until].clear()

    def _may_land(self) -> bool:
        """Return whether the step may end: its snapshot must wait for the one in progress."""
        return self._step is None or not (self._step.commit and self.snapshots.pending)

    def _commit(self) -> None:
        free = self._step is None and not self.updates.busy and not self.snapshots.pending
        if self._cut is not None and free:
            if not self.snapshots.spoiled:
                self.snapshots.begin(self._cut.number)
            self._cut = None
        self.snapshots.advance()
        if self._waiting[Until.DURABLE] and self._cut is None and not self.snapshots.pending:
            self._grant(Until.DURABLE)

    def _quieten(self) -> None:
        """Drop caches and grant ``QUIET`` once nothing moves and nothing else waits."""
        waits = any(tickets for until, tickets in self._waiting.items() if until is not Until.QUIET)
        moves = self.in_flight or self.updates.busy or self.gradients.moving
        if not (waits or moves or self._demands.compute_waits or self._step or self._cut
                or self.gradients.room_wanted):  # fmt: skip
            self._drop_caches()
            self._quiet = True
            self._grant(Until.QUIET)

    def _drop_caches(self) -> None:
        assert not self.in_flight, "caches are dropped only while nothing moves"
        self.items.forget_guesses()
        self.weights.drop_unused((Tier.DEVICE, Tier.HOST))
        self.weights.forget_kept()  # the next forward must not reuse slots that graphs keep
        self.updates.records.drop_unused()

    def _prefetch(self) -> None:
        room, updating = True, self.weights.updating
        queued = self.weights.queued
        if self._step is not None and queued > UNITS_AHEAD:
            return  # the updates will need the room first
        for ahead, use, unit in self._order.upcoming(self.layout.prefetch_depth):
            distance = ahead + queued
            if use is Use.COMPUTE:
                for member in self.layout.together[unit]:
                    if self._order.next_use(Use.UPDATE, member) < ahead:
                        continue  # an update would make a copy stale before its use
                    if room:
                        room = self.weights.toward_compute(member, distance, updating, guess=True)
                    elif self.layout.apart[member] and self.weights.units[member].device is None:
                        self.weights.toward_host(member, distance, updating, guess=True)
            else:
                self.weights.toward_host(unit, distance, updating, guess=True)

    @property
    def _somebody_waits(self) -> bool:
        """Whether any ticket waits for work to end."""
        blocking = self._step is not None and not self._step.background
        return bool(
            self._demands.tickets()
            or self.gradients.room_wanted
            or blocking
            or any(self._waiting.values())
        )

    def _refuse_all(self) -> None:
        """Refuse all waiting tickets, because an update finds no room and nothing moves.

        The room is taken by slots that graphs keep, or by a unit in use, if a caller waits for all
        updates during a forward.  Queued updates continue once that room is free.
        """
        unit = self.updates.blocked_at()
        held = any(u.kept or u.pins for u in self.weights.units)
        assert unit is not None and held, "someone waits and nothing moves"
        for ticket in self._tickets():
            self.items.refuse(ticket, Key(Kind.WEIGHTS, unit), Tier.HOST)
        self._forget_waiting()

    def _tickets(self) -> list[int]:
        """Return all tickets that are neither granted nor refused, except those of activations."""
        tickets = self._demands.tickets() + self.gradients.tickets()
        tickets += [ticket for waiting in self._waiting.values() for ticket in waiting]
        if self._step is not None and not self._step.background:
            tickets.append(self._step.ticket)
        return tickets

    def _forget_waiting(self) -> None:
        """Drop the waiting tickets: their callers were notified in another way."""
        if self._step is not None:
            self._step = replace(self._step, background=True)  # so its end grants no ticket
        self._demands.forget()
        self.gradients.forget_waiting()
        for tickets in self._waiting.values():
            tickets.clear()


def _new_order(layout: Layout) -> Order:
    moving = {
        Use.COMPUTE: layout.streamed,
        Use.UPDATE: [home.weights is Tier.NVME for home in layout.homes],
    }
    return Order(64 * max(1, len(layout.units)), moving)


_GOES_ON = (Need, AwaitUpdate, GradRoom, GradReady, Step)  # compute continues with these


def _about_saved(signal: Signal) -> bool:
    if isinstance(signal, Done):
        work = signal.work
        return isinstance(work, (Read, Write, CopyIn, CopyOut)) and work.item.kind is Kind.SAVED
    return isinstance(signal, (Saved, Fetch, SavedDropped, BackwardPhase))
