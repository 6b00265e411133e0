"""The residency machine: signals in, instructions out.  Pure: no device, I/O, threads or clock.

Every decision about what is where is made here, under one lock, by whoever drives the machine (the
executor's pump, or the simulator).  Demand goes before arrivals, arrivals before updates, updates
before prefetch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ..facts.tier import Tier
from .arena import Place
from .commits import Commits
from .gradients import Gradients
from .layout import Layout
from .messages import (
    Clear,
    Commit,
    CopyIn,
    CopyOut,
    Cut,
    Done,
    Durable,
    Failed,
    Freed,
    GradLost,
    GradReady,
    GradRoom,
    Grant,
    Instruction,
    Item,
    Kind,
    Landed,
    Need,
    Read,
    Refuse,
    Release,
    Seal,
    Settle,
    Settled,
    Signal,
    Sound,
    Spoiled,
    Step,
    Work,
    Write,
)
from .order import Order, Use
from .updates import UNITS_AHEAD, Updates
from .weights import Roles, Weights


class Residency:
    """Decides what moves when.  ``handle`` takes one signal; ``validate`` checks all invariants."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._groups = [(unit.index, *unit.shares) for unit in layout.units]
        homes = layout.homes
        moving = {
            Use.COMPUTE: [not all(homes[u].resident for u in group) for group in self._groups],
            Use.UPDATE: [home.weights is Tier.NVME for home in homes],
        }
        self.order = Order(64 * max(1, len(layout.units)), moving)
        self._out: list[Instruction] = []
        self.weights = Weights(layout, self.order, self._emit)
        self.gradients = Gradients(layout, self.weights.updating, self._emit)
        self.updates = Updates(layout, self.order, self.weights, self.gradients, self._emit)
        self.commits = self.updates.commits = Commits(layout, self.roles_of, self._emit)
        self._demands: deque[Need] = deque()
        self._step: Step | None = None
        self._settled: list[Settled] = []
        self._landed: list[Landed] = []
        self._durable: list[Durable] = []
        self._cut: Cut | None = None
        self._resort = (-1, 0)  # the ticket that came to the last resort, and how often
        self._sealed: int | None = None  # the facts of the step that has not landed yet
        self.in_flight: dict[Work, int] = {}
        self.failed = False

    def roles_of(self, item: Item) -> Roles:
        """The extents of weights or of a record of state."""
        if item.kind is Kind.WEIGHTS:
            return self.weights.units[item.number].roles
        return self.updates.states[item.number].roles

    def _emit(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (Grant, Refuse)):
            self.in_flight[instruction] = self.in_flight.get(instruction, 0) + 1
        self._out.append(instruction)

    def handle(self, signal: Signal) -> list[Instruction]:
        """Takes one signal and returns what is to be done, in order."""
        if isinstance(signal, (Done, Failed)):
            self._finish(signal)
        else:
            self._enter(signal)
        if not self.failed:
            self._advance()
        out, self._out = self._out, []
        return out

    # -- signals --------------------------------------------------------------------------------

    def _enter(self, signal: Signal) -> None:
        if isinstance(signal, Need):
            self._demands.append(signal)
        elif isinstance(signal, Release):
            for unit in self._groups[signal.unit]:
                item = self.weights.units[unit]
                assert item.pins > 0, f"unit {unit} was released more often than needed"
                item.pins -= 1
            for unit in signal.held:
                self.weights.keep(unit)
        elif isinstance(signal, Freed):
            self.weights.freed(signal.unit, signal.place)
        elif isinstance(signal, GradRoom):
            self.gradients.want_room(signal)
        elif isinstance(signal, GradReady):
            self.gradients.ready(signal)
            if signal.update:
                self.updates.add(signal.unit)
        elif isinstance(signal, Step):
            self._begin_step(signal)
        elif isinstance(signal, Landed):
            self._landed.append(signal)
        elif isinstance(signal, Settled):
            self._settled.append(signal)
        elif isinstance(signal, Durable):
            self._durable.append(signal)
        elif isinstance(signal, GradLost):
            self.gradients.lost(signal.unit)
        elif isinstance(signal, (Seal, Cut, Spoiled, Sound)):
            self._about_commits(signal)
        else:
            raise TypeError(f"not a signal: {signal!r}")

    def _about_commits(self, signal: Seal | Cut | Spoiled | Sound) -> None:
        if isinstance(signal, Spoiled):
            self.commits.spoiled.add(signal.unit)
        elif isinstance(signal, Sound):
            self.commits.spoiled.discard(signal.unit)
        elif isinstance(signal, Cut):
            self._cut = signal
        elif self.commits.pending and self.commits.sealed is None:
            self.commits.sealed = signal.number
        else:
            self._sealed = signal.number

    def _begin_step(self, step: Step) -> None:
        """Queues the updates in the order in which compute will want them."""
        assert self._step is None, "one step at a time"
        self.order.end_step()
        self._sealed = None
        self._step, self.weights.drains = step, not step.background
        for unit in self.updates.in_order(step.units):
            self.updates.add(unit)
        if step.background:
            self._emit(Grant(step.ticket))

    def _end_step(self) -> None:
        """All updates and their writes are over: what is stored now is one cut."""
        step, self._step = self._step, None
        if step is not None:
            self.updates.end_step()
            self.weights.drains = False
            if step.commit and not self.commits.spoiled:
                self.commits.begin(self._sealed)
                self._sealed = None
            if not step.background:
                self._emit(Grant(step.ticket))
        for signal in self._landed:
            self._emit(Grant(signal.ticket))
        self._landed.clear()

    def _finish(self, signal: Done | Failed) -> None:
        work = signal.work
        count = self.in_flight[work]
        if count == 1:
            del self.in_flight[work]
        else:
            self.in_flight[work] = count - 1
        if isinstance(signal, Failed):
            self.failed = True
        if self.failed:
            return
        if isinstance(work, (Read, Write, Clear)):
            self._moved(work)
        elif isinstance(work, CopyIn):
            self.weights.copy_done(work.unit)
        elif isinstance(work, CopyOut):
            self.gradients.copied_out(work.unit)
        elif isinstance(work, Settle):
            self.gradients.settled(work.unit)
        elif isinstance(work, Commit):
            self.commits.committed()
        else:
            self.updates.update_done(work)

    def _moved(self, work: Read | Write | Clear) -> None:
        kind, index = work.item
        written = isinstance(work, Write)
        if written and self.commits.saves(work.item):
            self.commits.saved(work.item)
            return
        if kind is Kind.STATE:
            if written:
                self.updates.state_written(index)
            else:
                self.updates.state_ready(index)
        elif kind is Kind.GRADS:
            if written:
                self.gradients.write_done(index)
            else:
                self.gradients.read_done(index)
        elif written:
            self.weights.write_done(index)
            self.updates.weights_written()
        else:
            self.weights.read_done(index)

    # -- progress -------------------------------------------------------------------------------

    def _advance(self) -> None:
        self.commits.advance()  # an update may wait for it
        while self._demands and self._serve(self._demands[0]):
            self._demands.popleft()
        self.gradients.advance()
        self.updates.advance()
        if self._demands and not self.in_flight:
            self._last_resort(self._demands[0])
        if self._settled and not self.gradients.moving:
            for signal in self._settled:
                self._emit(Grant(signal.ticket))
            self._settled.clear()
        if (self._step or self._landed) and not self.updates.busy and self._may_land():
            self._end_step()
        self._commit()
        if not self._demands:  # else prefetch could keep a blocked demand from ever being alone
            self.updates.prefetch()
            self._prefetch()
        if self._waiting and not self.in_flight:
            self._refuse_all()

    def _may_land(self) -> bool:
        """One commit at a time: the next cut is made when the one before is durable."""
        return self._step is None or not (self._step.commit and self.commits.pending)

    def _commit(self) -> None:
        free = self._step is None and not self.updates.busy and not self.commits.pending
        if self._cut is not None and free:
            if not self.commits.spoiled:
                self.commits.begin(self._cut.number)
            self._cut = None
        self.commits.advance()
        if self._durable and self._cut is None and not self.commits.pending:
            for signal in self._durable:
                self._emit(Grant(signal.ticket))
            self._durable.clear()

    @property
    def _waiting(self) -> bool:
        """Whether anyone waits for what only the end of a move could bring."""
        blocking = self._step is not None and not self._step.background
        return bool(
            self._demands or self.gradients.room_wanted or blocking or self._settled or self._landed
            or self._durable
        )  # fmt: skip

    def _serve(self, need: Need) -> bool:
        """Brings a demanded unit and those it shares to compute; grants when all are usable."""
        group = self._groups[need.unit]
        for unit in group:
            self.updates.promote(unit)
        # Waiting for a queued update costs less than to read its weights a second time.
        spare = self.weights.updating.union(group)
        for unit in group:
            self.weights.toward_compute(unit, -1, spare)
        if not all(self.weights.usable(u) for u in group):
            return False
        for unit in group:
            self.weights.units[unit].pins += 1
        self.order.observe(Use.COMPUTE, need.unit)
        self._emit(Grant(need.ticket))
        return True

    def _last_resort(self, need: Need) -> None:
        """Nothing moves, and the demand is not met: its own members may stand in each other's
        way, or small copies where large ones must lie side by side, so start over from nothing; if
        that does not help either, refuse.  It can help more than once, host and device by member,
        but not for ever: what waits for an update that has no room comes here again and again."""
        group = self._groups[need.unit]
        ticket, times = self._resort
        times = times + 1 if ticket == need.ticket else 1
        self._resort = need.ticket, times
        if times > 2 * len(group) + 2:
            self._demands.popleft()
            waits_for = self.updates.blocked_at()
            self._refuse(need.ticket, need.unit if waits_for is None else waits_for, Tier.HOST)
            return
        tier = self.layout.compute_tier
        for unit in range(len(self.layout.units)):
            if self.weights.evictable(unit, tier) is not None:
                self.weights.drop(unit, tier)
        blocked = [u for u in group if not self.weights.toward_compute(u, -1)]
        if not self.in_flight:
            self._demands.popleft()
            self._refuse(need.ticket, blocked[0] if blocked else need.unit, tier)

    def _refuse_all(self) -> None:
        """Nothing moves, and an update finds no room: graphs that are kept have it, or a unit in
        use has, where somebody waits for the end of all updates amid a forward.  Whoever waits is
        told; what is queued goes on when they are gone."""
        unit = self.updates.blocked_at()
        held = any(u.kept or u.pins for u in self.weights.units)
        assert unit is not None and held, "someone waits and nothing moves"
        for ticket in self._tickets():
            self._refuse(ticket, unit, Tier.HOST)
        self._forget_waiting()

    def _refuse(self, ticket: int, unit: int, tier: Tier) -> None:
        arena = self.weights.device_arena if tier is Tier.DEVICE else self.weights.host_arena
        nbytes = self.weights.units[unit].nbytes
        free = arena.nbytes - arena.used_bytes
        self._emit(Refuse(ticket, unit, tier.value, nbytes, free))

    def _prefetch(self) -> None:
        room, updating = True, self.weights.updating
        queued = self.weights.queued
        if self._step is not None and queued > UNITS_AHEAD:
            return  # what room there is will be wanted by the updates first
        for ahead, use, unit in self.order.upcoming(self.layout.prefetch_depth):
            distance = ahead + queued
            if use is Use.COMPUTE:
                for member in self._groups[unit]:
                    if self.order.next_use(Use.UPDATE, member) < ahead:
                        continue  # a copy now would be lost
                    if room:
                        room = self.weights.toward_compute(member, distance, updating)
                    elif self.layout.has_device and self.weights.units[member].device is None:
                        self.weights.toward_host(member, distance, updating)
            else:
                self.weights.toward_host(unit, distance, updating)

    @property
    def idle(self) -> bool:
        """Nothing under way and nothing waiting."""
        return not (
            self.in_flight
            or self._demands
            or self._step
            or self._settled
            or self._landed
            or self._durable
            or self._cut
            or self.updates.busy
            or self.gradients.moving
            or self.gradients.room_wanted
        )

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of (device, host) memory that hold something now: homes, and what moves through
        the regions."""
        regions, weights, grads = self.layout.regions, self.weights, self.gradients
        device = weights.device_arena.used_bytes + grads.device_arena.used_bytes
        device += self.updates.visits.used_bytes
        host = weights.host_arena.used_bytes + grads.host_arena.used_bytes
        return (
            regions.device_fixed + device,
            regions.host_fixed + host + self.updates.arena.used_bytes,
        )

    def drop_caches(self) -> None:
        """Drops every copy that is only cached.  Nothing may be under way."""
        assert self.idle, "caches are dropped only while nothing moves"
        for tier in (Tier.DEVICE, Tier.HOST):
            for unit in range(len(self.layout.units)):
                if self.weights.evictable(unit, tier) is not None:
                    self.weights.drop(unit, tier)
        for unit, item in enumerate(self.weights.units):
            copy = self.weights.compute_copy(unit)
            if copy is not None and copy.place in item.kept:
                self.weights.orphan(unit)  # a graph may keep its slot; the next forward must not
        self.updates.drop_cached()

    def scratch(self, kind: Kind, nbytes: int) -> Place | None:
        """Host memory that nobody uses as long as nothing moves, in the region of that kind."""
        if kind is Kind.STATE:
            return self.updates.arena.hole(nbytes)
        if kind is Kind.WEIGHTS:
            return self.weights.host_arena.hole(nbytes)
        return self.gradients.host_arena.hole(nbytes)

    def rollback(self) -> list[Item]:
        """Goes back to the last commit; all copies are dropped.  Nothing may be under way.

        Returns:
            What lives in memory and must be read again.
        """
        self.drop_caches()
        return self.commits.rollback()

    def abandon(self) -> list[int]:
        """After a failure: the tickets of all who still wait, each once."""
        tickets = self._tickets()
        self._forget_waiting()
        self._step = None
        return tickets

    def _tickets(self) -> list[int]:
        tickets = [need.ticket for need in self._demands]
        tickets += [wish.ticket for wish in self.gradients.room_wanted]
        tickets += [signal.ticket for signal in self._settled]
        tickets += [signal.ticket for signal in self._landed]
        tickets += [signal.ticket for signal in self._durable]
        for unit in self.gradients.units:
            if isinstance(unit.arrival, GradRoom):
                tickets.append(unit.arrival.ticket)
        if self._step is not None and not self._step.background:
            tickets.append(self._step.ticket)
        return tickets

    def _forget_waiting(self) -> None:
        """Whoever waits was told otherwise."""
        for unit in self.gradients.units:
            if isinstance(unit.arrival, GradRoom):
                unit.arrival = None
        if self._step is not None:
            self._step = replace(self._step, background=True)  # nobody waits for its end
        self._demands.clear()
        self.gradients.room_wanted.clear()
        self._settled.clear()
        self._landed.clear()
        self._durable.clear()
