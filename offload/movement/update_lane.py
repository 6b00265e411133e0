"""Threads that run the machine's work on memory: updates, clears and merges."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from ..facts.tier import Tier
from ..facts.trace import Trace
from ..schedule.layout import Layout
from ..schedule.messages import Accumulate, Clear, Update
from .accelerators.base import Accelerator
from .accelerators.pace import Pace
from .compute_use import RangeEvents
from .pools import Arenas

UpdateWork = Clear | Accumulate | Update


def is_on_device(task: UpdateWork) -> bool:
    """Return whether the device runs the task, and not the CPU."""
    return task.on_device if isinstance(task, Update) else task.place.tier is Tier.DEVICE


class UpdateLane:
    """A thread that runs one task after the other, and reports its end to ``finished``.

    Args:
        work_on: runs a task and returns whether its result is finite.
        spoiled: called with a unit whose values are not finite, before ``finished``.
        name: the name of the thread.
    """

    def __init__(
        self,
        layout: Layout,
        arenas: Arenas,
        accelerator: Accelerator,
        events: RangeEvents,
        trace: Trace,
        work_on: Callable[[UpdateWork], bool],
        spoiled: Callable[[int], None],
        finished: Callable[[UpdateWork, BaseException | None], None],
        name: str,
    ) -> None:
        self._arenas, self._accelerator, self._events = arenas, accelerator, events
        self._trace, self._work_on = trace, work_on
        self._spoiled, self._finished = spoiled, finished
        limits = accelerator.limits
        self._pace = Pace(limits.update_params_s)
        there = limits.device_update_params_s
        self._there = (limits.update_params_s or 0.0) / there if there else 1.0
        self._names = [unit.name for unit in layout.units]
        subgroups = [s for group in layout.subgroups for s in group]
        self._unit_of = [s.unit for s in subgroups]
        self._params = [s.count for s in subgroups]
        self._tasks: queue.SimpleQueue[tuple[UpdateWork, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"overspill-{name}", daemon=True)
        self._thread.start()

    def put(self, task: UpdateWork) -> None:
        """Queue a task."""
        self._tasks.put((task, time.perf_counter_ns()))

    def close(self) -> None:
        """Finish the queued tasks, end the thread and join it."""
        self._tasks.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while (queued := self._tasks.get()) is not None:
            task, queued_ns = queued
            try:
                self._do(task, queued_ns)
            except BaseException as error:
                self._finished(task, error)
            else:
                self._finished(task, None)

    def _do(self, task: UpdateWork, queued_ns: int) -> None:
        started = time.perf_counter_ns()
        name = self._names[
            self._unit_of[task.item.number] if isinstance(task, Clear) else task.unit
        ]
        with self._trace.during("update", name):
            finite = self._in_order(task)
        if not finite and isinstance(task, Update):
            self._spoiled(task.unit)
        if isinstance(task, Update):
            share = self._there if task.on_device else 1.0
            self._pace.hold(self._params[task.subgroup] * share, queued_ns)
            self._trace.add("update", name, started, time.perf_counter_ns(), task.state.nbytes)

    def _in_order(self, task: UpdateWork) -> bool:
        """Run a task; if it uses device memory, order it with copies and compute."""
        if isinstance(task, Update):
            touched = [task.visit] if task.visit else [task.weights, task.grads, task.state]
        else:
            touched = [task.place]
        places = [place for place in touched if place.tier is Tier.DEVICE]
        if not places:
            return self._work_on(task)
        with self._accelerator.update_stream():
            for place in places:
                for event in self._events.over(place):
                    self._accelerator.wait(event)
                self._accelerator.used(self._arenas.bytes_of(place))
            finite = self._work_on(task)
            event = self._accelerator.record()
        for place in places:
            self._events.set(place, event)
        event.synchronize()
        return finite
