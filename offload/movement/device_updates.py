"""Takes records of state to the device for their update, and brings them back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..facts.tier import Tier
from ..facts.trace import Trace
from ..schedule.arena import Place
from ..schedule.messages import Update
from .accelerators.base import Accelerator, CopyDone, Event
from .events import RangeEvents
from .pools import Arenas


class RecordParts(NamedTuple):
    """Where all is that a record's update needs.  The first two change."""

    state: Place
    weights: Place
    grads: Place


CHANGED = 2


class DeviceUpdates:
    """Copies in before the update, copies out after it; each end comes on another thread.

    Args:
        parts_of: where an update's parts live, and where they are on the device.
        name_of: the name in the trace.
        arrived: told when all is on the device.
        finished: told when state and weights are back, or of what went wrong.
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
        """Brings state, gradients and weights to the device."""

        def over(error: BaseException | None) -> None:
            if error is None:
                self._arrived(update)
            else:
                self._finished(update, error)

        homes, there = self._parts_of(update)
        moves = list(zip(there, homes, strict=True))
        self._copy("copy_in", self._accelerator.copy_in, update, moves, over)

    def back(self, update: Update) -> None:
        """Brings state and weights to where they live."""

        def over(error: BaseException | None) -> None:
            self._finished(update, error)

        homes, there = self._parts_of(update)
        moves = list(zip(homes, there, strict=True))[:CHANGED]
        self._copy("copy_out", self._accelerator.copy_out, update, moves, over)

    def _copy(
        self, lane: str, copy: Callable[..., Event], update: Update,
        moves: Sequence[tuple[Place, Place]], over: Callable[[BaseException | None], None],
    ) -> None:  # fmt: skip
        """Starts copies, each to the first place of a pair; ``over`` is told after the last, and
        not before all their events are known: what follows waits for them."""
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
