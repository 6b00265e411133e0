"""Copies state records to the device for their update, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..facts.tier import Tier
from ..facts.trace import Trace
from ..schedule.arena import Place
from ..schedule.messages import Update
from .accelerators.base import Accelerator, CopyDone, Event
from .compute_use import RangeEvents
from .pools import Arenas


class RecordParts(NamedTuple):
    """The places of all that a record's update uses. An update changes the first two."""

    state: Place
    weights: Place
    grads: Place


CHANGED = 2


class DeviceUpdates:
    """Copies records to the device before their update and back after it.

    Each copy ends on another thread, which makes the calls below.

    Args:
        parts_of: returns an update's parts, where they live and where they are on the device.
        name_of: returns the name in the trace.
        arrived: called when all parts are on the device.
        finished: called when state and weights are back, or with an error.
    """

    def __init__(
        self,
        arenas: Arenas,
        accelerator: Accelerator,
        events: RangeEvents,
        trace: Trace,
        parts_of: Callable[[Update], tuple[RecordParts, RecordParts]],
        name_of: Callable[[Update], str],
        arrived: Callable[[Update], None],
        finished: Callable[[Update, BaseException | None], None],
    ) -> None:
        self._arenas, self._accelerator, self._events = arenas, accelerator, events
        self._trace, self._parts_of, self._name_of = trace, parts_of, name_of
        self._arrived, self._finished = arrived, finished

    def start(self, update: Update) -> None:
        """Copy state, gradients and weights to the device."""

        def over(error: BaseException | None) -> None:
            if error is None:
                self._arrived(update)
            else:
                self._finished(update, error)

        homes, there = self._parts_of(update)
        moves = list(zip(there, homes, strict=True))
        self._copy("copy_in", self._accelerator.copy_in, update, moves, over)

    def back(self, update: Update) -> None:
        """Copy state and weights back to where they live."""

        def over(error: BaseException | None) -> None:
            self._finished(update, error)

        homes, there = self._parts_of(update)
        moves = list(zip(homes, there, strict=True))[:CHANGED]
        self._copy("copy_out", self._accelerator.copy_out, update, moves, over)

    def _copy(
        self, lane: str, copy: Callable[..., Event], update: Update,
        moves: Sequence[tuple[Place, Place]], over: Callable[[BaseException | None], None],
    ) -> None:  # fmt: skip
        """Start a copy for each (target, source) pair, and call ``over`` after the last has ended.

        ``over`` is not called before the events of all copies are recorded, because the work that
        follows waits for these events.
        """
        name, lock = self._name_of(update), threading.Lock()
        left, errors = len(moves) + 1, list[BaseException]()

        def ended(error: BaseException | None) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
                if error is not None:
                    errors.append(error)
            if last:
                over(errors[0] if errors else None)

        def done(end: CopyDone) -> None:
            self._trace.add(lane, name, end.started_ns, end.finished_ns, end.nbytes)
            ended(end.error)

        with self._trace.during(lane, name):
            for target, source in moves:
                device = target if target.tier is Tier.DEVICE else source
                event = copy(
                    self._arenas.bytes_of(target), self._arenas.bytes_of(source),
                    after=self._events.over(device), on_done=done,
                )  # fmt: skip
                self._events.set(device, event)
        ended(None)
