"""Drives the residency machine through whole steps without moving anything, and counts bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..config import Tier
from .layout import Layout
from .messages import (
    Clear,
    CopyIn,
    CopyOut,
    Done,
    GradReady,
    GradRoom,
    Grant,
    Kind,
    Need,
    Read,
    Refuse,
    Release,
    Settled,
    Signal,
    Step,
    Work,
    Write,
)
from .residency import Residency

LANES = ("read", "write", "copy_in", "copy_out")


@dataclass
class Traffic:
    """Bytes by lane."""

    lanes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))

    def count(self, work: Work, layout: Layout) -> None:
        """Adds what an instruction moves."""
        if isinstance(work, (Read, Write)):
            self.lanes["read" if isinstance(work, Read) else "write"] += item_bytes(work, layout)
        elif isinstance(work, CopyIn):
            self.lanes["copy_in"] += work.place.nbytes
        elif isinstance(work, CopyOut):
            self.lanes["copy_out"] += work.source.nbytes


def item_bytes(work: Read | Write | Clear, layout: Layout) -> int:
    """Size of the extent that a read or write moves."""
    kind, index = work.item
    if kind is Kind.WEIGHTS:
        return layout.units[index].weight_bytes
    if kind is Kind.GRADS:
        return layout.grad_bytes[index]
    return next(s.nbytes for group in layout.subgroups for s in group if s.index == index)


class DryRun:
    """A machine whose moves end at once, in order, whenever compute has to wait for something."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.machine = layout, Residency(layout)
        self.pending: deque[Work] = deque()
        self.granted: set[int] = set()
        self.traffic = Traffic()
        self._ticket = 0
        self._state_bytes = {s.index: s.nbytes for group in layout.subgroups for s in group}

    def _send(self, signal: Signal) -> None:
        for instruction in self.machine.handle(signal):
            if isinstance(instruction, Grant):
                self.granted.add(instruction.ticket)
            elif isinstance(instruction, Refuse):
                raise AssertionError(f"the machine refused unit {instruction.unit}")
            else:
                self._count(instruction)
                self.pending.append(instruction)

    def _count(self, work: Work) -> None:
        if isinstance(work, (Read, Write)) and work.item.kind is Kind.STATE:
            lane = "read" if isinstance(work, Read) else "write"
            self.traffic.lanes[lane] += self._state_bytes[work.item.number]
        else:
            self.traffic.count(work, self.layout)

    def _new_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _wait(self, ticket: int) -> None:
        while ticket not in self.granted:
            self._send(Done(self.pending.popleft()))
        self.granted.discard(ticket)

    def use(self, unit: int) -> None:
        """Compute runs one unit."""
        home, shares = self.layout.homes[unit], self.layout.units[unit].shares
        if home.resident and all(self.layout.homes[s].resident for s in shares):
            return
        ticket = self._new_ticket()
        self._send(Need(unit, ticket))
        self._wait(ticket)
        self._send(Release(unit))

    def gradients(self, unit: int, *, merge: bool, update: bool) -> None:
        """The gradients of one unit come."""
        ticket = self._new_ticket()
        self._send(GradRoom(unit, ticket, merge and not self.layout.has_device))
        self._wait(ticket)
        self._send(GradReady(unit, merge, update))

    def step(self, micro_steps: int, update_in_backward: bool) -> None:
        """One optimizer step over all units in their order."""
        order = [u.index for u in self.layout.units]
        for micro in range(micro_steps):
            for unit in order:
                self.use(unit)
            for unit in reversed(order):
                self.use(unit)
                if self.layout.units[unit].trainable:
                    final = update_in_backward and micro == micro_steps - 1
                    self.gradients(unit, merge=micro > 0, update=final)
        ticket = self._new_ticket()
        self._send(Settled(ticket))
        self._wait(ticket)
        trained = tuple(u.index for u in self.layout.units if u.trainable)
        self._send(Step(trained, ticket := self._new_ticket()))
        self._wait(ticket)


def predict_traffic(
    layout: Layout, *, micro_steps: int, update_in_backward: bool
) -> dict[str, int]:
    """Bytes per lane of a step in the steady state, by running the machine for three steps."""
    run = DryRun(layout)
    for _ in range(2):
        run.step(micro_steps, update_in_backward)
    run.traffic = Traffic()
    run.step(micro_steps, update_in_backward)
    return run.traffic.lanes


__all__ = ["LANES", "DryRun", "Tier", "Traffic", "predict_traffic"]
