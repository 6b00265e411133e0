"""Runs the residency machine: carries out its instructions and returns the results as signals.

One pump thread calls the machine. All other threads only put signals into its queue, or read state.
Moves end on threads of the I/O engine and of the accelerator, updates on the update lanes. Each
puts ``Done`` or ``Failed`` into the queue. After a failure the machine drains, waiting threads are
woken with the error, and later calls are refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from ..facts.trace import Trace
from ..io_engine.one_shot_event import OneShotEvent
from ..schedule.arena import Place
from ..schedule.invariants import validate
from ..schedule.layout import Layout
from ..schedule.ledger import Ledger
from ..schedule.messages import (
    Accumulate,
    Clear,
    Commit,
    CopyIn,
    CopyOut,
    Done,
    Failed,
    FiniteCheck,
    Freed,
    FreeDeviceCopy,
    FreeItem,
    GradientStored,
    Grant,
    Instruction,
    Kind,
    NotCommitted,
    Read,
    Refuse,
    Signal,
    Update,
    Work,
    Write,
)
from ..schedule.protocol import Protocol
from ..schedule.residency import Residency
from .accelerators.base import Accelerator
from .commit_writer import CommitWriter
from .compute_use import ComputeUse, RangeEvents
from .device_updates import DeviceUpdates, RecordParts
from .disk import Disk
from .engine_port import EnginePort, Waiter, refusal
from .extents import Extents
from .health import Health
from .moves import Mover, Transfer
from .pools import Arenas
from .saved_storages import End, SavedStore
from .update_lane import UpdateLane, UpdateWork, is_on_device


class Executor:
    """The runtime around the residency machine.

    Attributes:
        engine_port: how other threads communicate with the machine.
        protocol: the signals that they send, in the right order.
        compute: orders compute with moves of the memory that it uses.
        health: whether all this still works.

    Args:
        work_on: runs updates and merges on a lane, and returns whether their results are finite.
        visit: for an update on the device, returns where its parts live and where they are on the
            device.
        ledger: receives every signal, on the pump's thread, before the machine handles it.
        before_asking: see ``EnginePort``.
        commits: makes cuts durable.
        saved_changed: called with the bytes of saved tensors that compute has, and disks have.
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
        self._trace, self._check, self._commits = trace, check, commits
        self._ledger = ledger
        events = RangeEvents()
        self.health = Health(lambda: None if commits is None else commits.folder)
        self.compute = ComputeUse(events, accelerator, trace)
        self.engine_port = EnginePort(layout, self.health, self.compute, trace, before_asking)
        self._put = self.engine_port.queue.put
        self.protocol = Protocol(layout, self.engine_port.ask, self.engine_port.tell, ledger.landed)
        self._started = 0  # work in progress; written by the pump
        # The machine, or the code that carries out its instructions, raised: it is not called
        # any more.
        self._drains = False
        self._drained: OneShotEvent | None = None  # set for ``close`` once no work is in progress
        self.saved = SavedStore(self._put, self.engine_port.ask, saved_changed)
        self._mover = Mover(
            layout, arenas, accelerator, disk, extents, events, trace, self.saved, self._moved
        )
        make_lane = partial(
            UpdateLane, layout, arenas, accelerator, events, trace, work_on,
            lambda unit: self._put(FiniteCheck(unit, finite=False)), self._worked,
        )  # fmt: skip
        self._here = self._there = make_lane("update")
        if accelerator.device.type != "cpu" or accelerator.limits.device_update_params_s:
            self._there = make_lane("update-there")  # runs at the same time as ``_here``
        self._device_updates = DeviceUpdates(
            arenas, accelerator, events, trace, visit,
            lambda update: layout.units[update.unit].name, self._there.put, self._finished,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._pump, name="overspill-pump", daemon=True)
        self._thread.start()

    def occupied(self) -> list[Place]:
        """Return the places in the regions that hold data, while nothing moves."""
        with self.engine_port.lock:
            return self._machine.occupied()

    # -- the pump -------------------------------------------------------------------------------

    def _pump(self) -> None:
        while (told := self.engine_port.queue.get()) is not None:
            if isinstance(told, OneShotEvent):  # a thread waits for everything queued before
                told.set()
            else:
                heard = self.saved.has_ended(told) if isinstance(told, End) else told
                if heard is not None:
                    with self.engine_port.lock:
                        self._hear(heard)
            if self._drained is not None and not self._started and self.engine_port.queue.empty():
                self._drained.set()

    def _hear(self, told: Signal | Waiter) -> None:
        signal = self.engine_port.heard(told)
        self._started -= isinstance(signal, (Done, Failed, NotCommitted))
        try:
            self._take(signal)
        except BaseException as error:
            self.health.fail(error)
            self._drains = True
        if self.health.failed:
            self.engine_port.wake_all()

    def _take(self, signal: Signal) -> None:
        if not self.health.failed:
            self._ledger.told(signal)
            self.protocol.told(signal)
        self.engine_port.count(signal)
        if self._drains:
            return
        instructions = self._machine.handle(signal)
        if self._check and not self.health.failed and not isinstance(signal, Failed):
            validate(self._machine)
        saved = self._machine.saved_bytes()
        self._trace.level(time.perf_counter_ns(), *self._machine.used_bytes(), saved[0])
        self.saved.counted(*saved)
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Grant):
            self.engine_port.answer(instruction.ticket, instruction, None)
        elif isinstance(instruction, Refuse):
            self.engine_port.answer(instruction.ticket, None, refusal(self.layout, instruction))
        elif isinstance(instruction, GradientStored):
            self.engine_port.at_home(instruction)
        elif isinstance(instruction, FreeDeviceCopy):
            self.saved.let_go(instruction.item.number)
        elif isinstance(instruction, FreeItem):
            self._mover.forget(instruction.item)
        else:
            self._started += 1
            try:
                self._start(instruction)
            except BaseException as error:
                self._finished(instruction, error)

    def _start(self, work: Work) -> None:
        assert self.arenas.read_freed is None or _may_start_asleep(work), f"{work} while it sleeps"
        if isinstance(work, Update) and work.visit is not None:
            self._device_updates.start(work)
        elif isinstance(work, (Clear, Accumulate, Update)):
            (self._there if is_on_device(work) else self._here).put(work)
        elif isinstance(work, Commit):
            assert self._commits is not None
            self._commits.put(work, lambda error: self._committed(work, error))
        else:
            self._mover.start(work)

    # -- ends -----------------------------------------------------------------------------------

    def _worked(self, task: UpdateWork, error: BaseException | None) -> None:
        """Handle the end of a task on an update lane."""
        try:
            if error is None and isinstance(task, Update) and task.visit is not None:
                self._device_updates.back(task)
                return
        except BaseException as raised:
            error = raised
        self._finished(task, error)

    def _moved(self, work: Transfer, error: BaseException | None) -> None:
        """Handle the end of a move."""
        if error is None and isinstance(work, Write) and self._commits is not None:
            if self._mover.may_be_changed(work):
                name = self.layout.units[work.item.number].name
                memory = self.arenas.bytes_of(work.place).numpy()
                self._commits.check(work, memory, name, lambda wrong: self._finished(work, wrong))
                return
            self._commits.sound(work)
        self._finished(work, error)

    def _committed(self, work: Commit, error: BaseException | None) -> None:
        """Handle the end of a commit.

        If its data could not be made durable, no record was begun. The last commit stays valid, and
        weights and state can still be moved and read, but not trained. With several ranks the
        engine stops, since they commit together.
        """
        assert self._commits is not None
        if error is None or self._commits.agrees or not self._commits.stopped:
            self._finished(work, error)
        else:
            self.health.cannot_commit(error)
            self._put(NotCommitted(work))

    def _finished(self, work: Work, error: BaseException | None) -> None:
        if error is not None:
            self.health.fail(error)
            self._put(Failed(work))
        else:
            self._put(Done(work))

    def close(self) -> None:
        """Drain, then end and join the threads. Never raises, never hangs on a failure."""
        if self.health.closed or self.health.forked:
            return
        self._drained = drained = OneShotEvent()
        self._put(OneShotEvent())  # so that the pump checks ``_drained`` if no other signal comes
        drained.wait(timeout=60)
        self.health.closed = True
        for lane in {self._here, self._there}:
            lane.close()
        self._put(None)
        self._thread.join(timeout=60)
        self.engine_port.close()


def _may_start_asleep(work: Work) -> bool:
    """Return whether work touches none of the memory that ``sleep`` frees.

    A commit only records where the items are, as all writes are over.  Saved tensors are in memory
    of PyTorch's allocator, and move through host memory that has no contents while it is freed.
    """
    if isinstance(work, (Read, Write, CopyIn, CopyOut)):
        return work.item.kind is Kind.SAVED
    return isinstance(work, Commit)
