"""A discrete-event simulation of whole steps, with the real residency machine and a virtual clock.

See Note [What the simulator models].
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from ..facts.rates import Rates
from ..facts.tier import Tier
from ..facts.trace import Trace
from ..schedule.activations import LEAST_BYTES, room_beside
from ..schedule.arena import Place
from ..schedule.layout import PACKED_SHARE, Layout
from ..schedule.messages import (
    Accumulate,
    BackwardPhase,
    Clear,
    Commit,
    CopyIn,
    CopyOut,
    Done,
    Fetch,
    FreeDeviceCopy,
    FreeItem,
    GradientStored,
    Grant,
    Kind,
    Read,
    Refuse,
    Release,
    Saved,
    SavedBytes,
    SavedDropped,
    Signal,
    Update,
    Work,
    Write,
)
from ..schedule.protocol import Protocol
from ..schedule.residency import Residency
from ..schedule.visits import visit_in
from .bounds import device_update_flops, update_seconds, updates_beside
from .costs import Costs
from .lanes import LEGS, Compute, ComputePart, Lane, Leg
from .save_timing import ATTENTION, INPUTS

LANE_OF: dict[type, str] = {
    Read: "read", Write: "write", CopyIn: "copy_in", CopyOut: "copy_out", Commit: "write",
}  # fmt: skip
LINKS = ("read", "write", "copy_in", "copy_out")
DISK = ("read", "write")
LEG_COPIES = {"copy_in": 3, "copy_out": 2}
LEAST_SPEED = 0.05  # of compute and updates, even if disk transfers need all processor time

# Note [What the simulator models]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The simulator drives the same residency machine, through the same ``Protocol``, as a real run.  It
# sends the signals that the module hooks and the optimizer would send, and replaces the executor:
# each instruction becomes a piece of work in a *lane* (read, write, copy_in, copy_out, update,
# compute, and "there" for updates on the device).
#
# A lane does one piece of work at a time, in the order of the executor's lanes: urgent reads first,
# then first in, first out.  A piece takes its bytes or parameters divided by the lane's rate.  When
# it ends, the machine gets ``Done``.  A heap has the expected end of each lane's current piece.
#
# Lanes slow each other down: reads and writes that share the disks do, and without a device compute
# and updates share the processors (half each); with one, compute and updates with matrix products
# share the device.  Compute also stops while a transfer to or from disk
# needs a processor.  When a lane becomes busy or idle, ``_changed`` updates the remaining work of
# its rivals and schedules a new end for them; ``Lane.turn`` marks the old entries as void.
#
# The result is a trace of the same form as a real run's, so the same code computes statistics.


class Simulation:
    """A simulated run with one layout.  ``step`` runs one optimizer step."""

    def __init__(self, layout: Layout, costs: Costs) -> None:
        self.layout, self.costs, self.machine = layout, costs, Residency(layout)
        self._protocol = Protocol(layout, self._ask, self._send)
        self.now_s = 0.0
        self.trace = Trace(origin_ns=0)
        self.peak_bytes = dict.fromkeys(Tier, 0)
        self.moved = dict.fromkeys(LINKS, 0)  # bytes so far
        self._lanes = {name: Lane(name) for name in (*LINKS, "update", "there", "compute")}
        self._ends: list[tuple[float, int, int, Lane]] = []
        self._numbers = itertools.count()
        self._grants: dict[int, Grant] = {}
        self._arriving: set[Place] = set()  # places on the device with a copy in progress
        self._facts = itertools.count(1)
        # By number of an offloaded storage: the places of the parts that were copied back so far.
        self._away: dict[int, list[Place]] = {}
        self._saved: list[list[tuple[float, SavedBytes]]] = [[] for _ in layout.units]
        self._largest = 0  # bytes of the largest of these
        self.overflows = False  # whether some saved storage found no room
        self._computing = ""  # name of the unit that compute runs
        self._lane = "update"  # the lane whose work ended last
        subgroups = [s for group in layout.subgroups for s in group]
        self._device_updates = [visit_in(layout, s) for s in subgroups]
        names = [unit.name for unit in layout.units]
        self._names = {
            Kind.WEIGHTS: [f"weights {name}" for name in names],
            Kind.GRADS: [f"grads {name}" for name in names],
            Kind.STATE: [f"state {names[s.unit]} {s.index}" for s in subgroups],
        }
        self._nbytes_of = {
            Kind.WEIGHTS: [unit.stored_bytes for unit in layout.units],
            Kind.GRADS: layout.grad_bytes,
            Kind.STATE: [s.nbytes for s in subgroups],
        }
        running = [unit for unit in layout.units if unit.runs]
        self._backwards = [unit.index for unit in running if not unit.forward_only]
        self._running = [unit.index for unit in running if unit.forward_only] + self._backwards
        again = layout.saved.recompute
        self._backward_s = [
            s + (costs.recompute_s(i, layout.saved) if i in again else 0.0)
            for i, s in enumerate(costs.backward_s)
        ]
        rates = costs.rates
        self._there = "there" if layout.has_device and updates_beside(rates) else "update"
        self._per_byte = {
            "read": _inverse(rates.disk_read_bytes_s),
            "write": _inverse(rates.disk_write_bytes_s),
            "copy_in": _inverse(rates.h2d_bytes_s),
            "copy_out": _inverse(rates.d2h_bytes_s),
        }
        self._both = _slowdown(rates)
        # By lane: the lanes that change speed when it becomes busy or idle.
        self._rivals: dict[str, tuple[str, ...]] = dict.fromkeys(self._lanes, ())
        if self._both != 1.0:
            self._rivals.update(read=("write",), write=("read",))
        self._takes = dict.fromkeys(DISK, 0.0)  # share of compute's time that transfers cost
        if not layout.has_device and costs.shared:
            moved_s = _inverse(rates.disk_cpu_bytes_s)
            self._takes = {
                name: moved_s / self._per_byte[name] if self._per_byte[name] else 0.0
                for name in DISK
            }
            for name in DISK:
                self._rivals[name] += ("update", "compute")
            self._rivals.update(update=("compute",), compute=("update",))
        elif layout.has_device and device_update_flops(layout):
            self._rivals.update({self._there: ("compute",), "compute": (self._there,)})

    # -- moves ----------------------------------------------------------------------------------

    def _send(self, signal: Signal) -> None:
        self._protocol.told(signal)
        for instruction in self.machine.handle(signal):
            if isinstance(instruction, Grant):
                self._grants[instruction.ticket] = instruction
            elif isinstance(instruction, Refuse):
                if instruction.item.kind is not Kind.SAVED:
                    raise AssertionError(f"refused: {self.layout.name(instruction.item)}")
                self._grants[instruction.ticket] = Grant(instruction.ticket)
                self.overflows = True  # the storage stays at compute
            elif isinstance(instruction, FreeDeviceCopy):
                self._away[instruction.item.number] = []
            elif isinstance(instruction, FreeItem):
                self._away.pop(instruction.item.number, None)
            elif isinstance(instruction, Update) and instruction.visit is not None:
                self._queue(Leg(instruction, "copy_in"), "copy_in")
            elif not isinstance(instruction, GradientStored):
                if isinstance(instruction, CopyIn):
                    self._arriving.add(instruction.place)
                    if instruction.item.kind is Kind.SAVED:
                        self._away[instruction.item.number].append(instruction.place)
                urgent = isinstance(instruction, Read) and instruction.urgent
                there = isinstance(instruction, Update) and instruction.on_device
                name = LANE_OF.get(type(instruction), self._there if there else "update")
                self._queue(instruction, name, urgent)
        self._note_peaks()

    def _queue(self, work: Work | Leg, name: str, urgent: bool = False) -> None:
        lane = self._lanes[name]
        (lane.urgent if urgent else lane.line).append(work)
        if lane.current is None:
            self._start(lane)

    def _start(self, lane: Lane) -> None:
        line = lane.urgent or lane.line
        if line:
            lane.current = work = line.popleft()
            lane.started_s = lane.seen_s = self.now_s
            lane.left_s = self._seconds(lane, work)
            self._foresee(lane)
            self._changed(lane)

    def _foresee(self, lane: Lane) -> None:
        """Schedule the end of the lane's current piece at its current speed."""
        lane.turn += 1
        lane.speed = self._speed(lane.name)
        end_s = self.now_s + lane.left_s / lane.speed
        heapq.heappush(self._ends, (end_s, next(self._numbers), lane.turn, lane))

    def _busy(self, name: str) -> bool:
        return self._lanes[name].current is not None

    def _speed(self, name: str) -> float:
        """Return the speed of a lane (1 at most), given what the other lanes do now."""
        if name in DISK:
            other = "write" if name == "read" else "read"
            return 1 / self._both if self._busy(other) else 1.0
        if not self._rivals[name]:
            return 1.0
        free = 1.0 - sum(self._takes[d] * self._lanes[d].speed for d in DISK if self._busy(d))
        halved = self._busy("compute") and self._busy(self._there)
        return max(LEAST_SPEED, free / (2 if halved else 1))

    def _changed(self, lane: Lane) -> None:
        """Update the speeds of a lane's rivals after it became busy or idle."""
        for name in self._rivals[lane.name]:
            other = self._lanes[name]
            if other.current is not None:
                other.left_s -= (self.now_s - other.seen_s) * other.speed
                other.seen_s = self.now_s
                self._foresee(other)

    def _seconds(self, lane: Lane, work: Work | Leg) -> float:
        rates = self.costs.rates
        if lane.told == "update" and isinstance(work, (Update, Leg)):
            update = work if isinstance(work, Update) else work.update
            record = self.layout.records[update.subgroup]
            return update_seconds(record, rates, on_device=update.on_device)
        if isinstance(work, (Accumulate, Clear)):
            moved = work.place.nbytes * (2 if isinstance(work, Accumulate) else 1)
            return moved * _inverse(rates.dram_bytes_s)
        seconds = self._nbytes(work) * self._per_byte[lane.name]
        if isinstance(work, (CopyIn, CopyOut)) and not self.layout.has_device:
            moved = work.place.nbytes + work.source.nbytes
            return moved * _inverse(rates.dram_bytes_s)
        if isinstance(work, (CopyIn, CopyOut)):
            return seconds + (rates.link_latency_s or 0.0)
        if isinstance(work, Leg):
            return seconds + LEG_COPIES[lane.name] * (rates.link_latency_s or 0.0)
        return seconds

    def _nbytes(self, work: Work | Leg) -> int:
        if isinstance(work, Leg):
            visit = self._device_updates[work.update.subgroup]
            moved = {"copy_in": visit.in_bytes, "update": visit.state, "copy_out": visit.out_bytes}
            return moved[work.lane]
        if isinstance(work, (Read, Write)):
            if work.item.kind is Kind.SAVED:
                return work.place.nbytes
            return self._nbytes_of[work.item.kind][work.item.number]
        if isinstance(work, CopyIn):
            if work.source.tier is Tier.DEVICE:  # unpacked on the device: not copied over the link
                return 0
            return work.source.nbytes
        if isinstance(work, CopyOut):  # what may be packed on the way out is smaller there
            return work.place.nbytes if work.item.kind is Kind.SAVED else work.source.nbytes
        return work.state.nbytes if isinstance(work, Update) else 0

    def _name(self, work: Work | Leg) -> str:
        if isinstance(work, Leg):
            return self.layout.units[work.update.unit].name
        if not isinstance(work, (Accumulate, Update, Clear, Commit)) and (
            work.item.kind is Kind.SAVED
        ):
            return self.layout.name(work.item)
        if isinstance(work, (Read, Write)):
            return self._names[work.item.kind][work.item.number]
        if isinstance(work, (Clear, Commit)):
            return "clear" if isinstance(work, Clear) else "commit"
        unit = work.unit if isinstance(work, (Accumulate, Update)) else work.item.number
        return self.layout.units[unit].name

    def _end_next(self) -> None:
        """Advance the clock to the next end of a piece of work, and process it."""
        end_s, _, turn, lane = heapq.heappop(self._ends)
        work = lane.current
        if turn != lane.turn:
            return
        self.now_s = end_s
        assert work is not None
        lane.current = None
        if isinstance(work, Compute):
            self._changed(lane)
            return
        self._lane = "update" if isinstance(work, (Update, Leg)) else lane.name
        if not isinstance(work, (Accumulate, Clear)):
            began, ended, nbytes = _ns(lane.started_s), _ns(self.now_s), self._nbytes(work)
            self.trace.add(lane.told, self._name(work), began, ended, nbytes)
            if lane.name in self.moved and (self.layout.has_device or lane.name in DISK):
                self.moved[lane.name] += nbytes
        self._start(lane)
        if lane.current is None:
            self._changed(lane)
        if isinstance(work, CopyIn):
            self._arriving.discard(work.place)
        if not isinstance(work, Leg):
            self._send(Done(work))
        elif (following := LEGS.get(work.lane)) is not None:
            name = self._there if following == "update" else following
            self._queue(Leg(work.update, following), name)
        else:
            self._send(Done(work.update))

    def _note_peaks(self) -> None:
        machine, peak = self.machine, self.peak_bytes
        device, host = machine.used_bytes()
        if device > peak[Tier.DEVICE]:
            peak[Tier.DEVICE] = device
        if host > peak[Tier.HOST]:
            peak[Tier.HOST] = host
        self.trace.level(_ns(self.now_s), device, host, machine.saved_bytes()[0])

    # -- compute --------------------------------------------------------------------------------

    def _ask(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant:
        """Send a signal and wait for its grant; record a stall if time passes."""
        ticket = next(self._numbers)
        self._send(make(ticket))
        started_s, lane = self.now_s, "update"
        while ticket not in self._grants:
            self._end_next()
            lane = self._lane
        if self.now_s > started_s and self._computing:
            self.trace.stall(lane, _ns(started_s), _ns(self.now_s), self._computing)
        return self._grants.pop(ticket)

    def _arrive(self, places: Iterable[Place | None]) -> None:
        """Wait for the copies in progress to these places on the device."""
        started_s = self.now_s
        for place in places:
            while place in self._arriving:
                self._end_next()
        if self.now_s > started_s and self._computing:
            self.trace.stall("copy_in", _ns(started_s), _ns(self.now_s), self._computing)

    def _compute(self, unit: int, parts: Sequence[ComputePart]) -> None:
        """Run one unit's forward or backward once its weights are there."""
        name, group = self.layout.units[unit].name, self.layout.together[unit]
        self._computing = name
        self._protocol.catch_up(unit)
        self._arrive(self.layout.homes[member].device_place for member in group)
        streamed = self.layout.streamed[unit]
        if streamed:
            self._arrive(self._protocol.need(unit))
        for seconds, needed, saved in parts:
            if needed is not None:
                self._recall(needed)
            self._run(unit, seconds)
            if needed is not None:
                self._send(SavedDropped((needed.number,)))
            if saved is not None:
                self._save(saved)
        if streamed:
            self._send(Release(unit))
        self._computing = ""

    def _run(self, unit: int, seconds: float) -> None:
        started_s, lane = self.now_s, self._lanes["compute"]
        if seconds:
            lane.current, lane.left_s, lane.seen_s = Compute(unit), seconds, started_s
            self._foresee(lane)
            self._changed(lane)
            while lane.current is not None:
                self._end_next()
            self.trace.add("compute", self._computing, _ns(started_s), _ns(self.now_s))

    def _pieces(self, unit: int) -> list[tuple[float, SavedBytes]]:
        """Return the storages that autograd saves in a unit's forward, each with the share of the
        forward that is done by then.

        For a recomputed unit, only its inputs, and the outputs of attention if it keeps them: what
        its recomputation saves is used at once.
        """
        costs = self.costs
        forward_only = self.layout.units[unit].forward_only
        if forward_only or not costs.saved_bytes or self.layout.saved.policy == "keep":
            return []
        recomputes = unit in self.layout.saved.recompute
        whole = (costs.input_bytes if recomputes else costs.saved_bytes)[unit]
        bursts = [(share, part * whole)
                  for share, part in (INPUTS if recomputes else costs.bursts_of(unit))]  # fmt: skip
        if kept := costs.kept_bytes(unit, self.layout.saved):
            bursts.append((ATTENTION, kept))
        pieces, nbytes = [], 0.0
        for share, part in bursts:
            nbytes += part
            if nbytes >= LEAST_BYTES:
                number = next(self._numbers)  # packed: some of every ten; no recomputation's input
                packs = not recomputes and number % 10 < 10 * PACKED_SHARE
                itemsize = self.layout.saved.itemsize if packs else 0
                pieces.append((share, SavedBytes(number, int(nbytes), unit, itemsize)))
                nbytes = 0.0
        return pieces

    def _save(self, piece: SavedBytes) -> None:
        """Report a saved storage; wait if it exceeds the room."""
        self._largest = max(self._largest, piece.nbytes)
        room = room_beside(self.layout.saved.compute, self._largest)
        if self.machine.saved_bytes()[0] + piece.nbytes > room:
            self._ask(lambda ticket: Saved((piece,), ticket))
        else:
            self._send(Saved((piece,)))

    def _recall(self, piece: SavedBytes) -> None:
        """Wait until a saved storage that backward needs is back."""
        parts = len(self.layout.saved.part_sizes(piece.nbytes))
        while len(self._away.get(piece.number, range(parts))) < parts:
            self._ask(lambda ticket: Fetch(piece.number, ticket))
        self._arrive(self._away.get(piece.number, ()))

    def _deliver(self, unit: int, *, merge: bool, update: bool) -> None:
        """Gather the gradients of one unit and hand them over."""
        self._computing = self.layout.units[unit].name
        self._protocol.room(unit, merge=merge)
        in_place = not self.layout.has_device
        self._protocol.gathered(unit, merge=merge, update=update, in_place=in_place)
        self._computing = ""

    def step(self, micro_steps: int, update: str, *, commit: bool = False) -> float:
        """Run one optimizer step over all units in their order, or one forward if nothing is
        trained.

        Args:
            micro_steps: forward and backward passes.
            update: when the update runs: ``"step"``, ``"backward"`` or ``"next_forward"``.
            commit: whether to commit the step.

        Returns:
            The simulated seconds.
        """
        began_s = self.now_s
        if commit and self._protocol.open:
            self._protocol.seal(next(self._facts))
        for micro in range(micro_steps):
            self._forward()
            if self.layout.trains:
                final = update == "backward" and micro == micro_steps - 1
                self._backward(merge=micro > 0, update=final)
        if self.layout.trains:
            self._finish_step(update, commit)
        else:
            self._protocol.forward_again()
        index = len(self.trace.steps) + 1
        self.trace.mark_step(index, _ns(self.now_s))
        return self.now_s - began_s

    def _forward(self) -> None:
        for index in self._running:
            pieces = self._saved[index] = self._pieces(index)
            if pieces:
                self._send(Saved((), unit=index))
            seconds, done, parts = self.costs.forward_s[index], 0.0, []
            for share, piece in pieces:
                parts.append(ComputePart((share - done) * seconds, saved=piece))
                done = share
            self._compute(index, [*parts, ComputePart((1 - done) * seconds)])

    def _backward(self, *, merge: bool, update: bool) -> None:
        self._send(BackwardPhase(backward=True))
        for index in reversed(self._backwards):
            pieces, self._saved[index] = self._saved[index], []
            # An operation needs what it saved for the backward of what it computed after that.
            seconds, left, parts = self._backward_s[index], 1.0, []
            for share, piece in reversed(pieces):
                parts.append(ComputePart((left - share) * seconds, needed=piece))
                left = share
            self._compute(index, [*parts, ComputePart(left * seconds)])
            if self.layout.units[index].trainable:
                if update:
                    self._protocol.finish_updates()
                self._deliver(index, merge=merge, update=update)
        self._send(BackwardPhase(backward=False))

    def _finish_step(self, update: str, commit: bool) -> None:
        """Simulate ``optimizer.step()``."""
        if update != "backward":
            self._protocol.await_gradients()
        self._protocol.finish_updates()
        trained = tuple(u.index for u in self.layout.units if u.trainable)
        background = update != "step" and not self.layout.still
        self._protocol.step(trained, background=background, commit=commit)
        if not background:
            self._protocol.finish_updates()
            self._arrive(home.device_place for home in self.layout.homes)


def _inverse(rate: float | None) -> float:
    return 1 / rate if rate else 0.0


def _slowdown(rates: Rates) -> float:
    """Return the factor by which a transfer takes longer while the disk also transfers the other
    way."""
    read, write = rates.disk_read_bytes_s, rates.disk_write_bytes_s
    both = rates.disk_both_bytes_s
    return max(1.0, (read + write) / both) if read and write and both else 1.0


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
