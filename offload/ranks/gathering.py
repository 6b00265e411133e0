"""Gathers updated weights of replicated models from all ranks, on a thread of its own.

Weights come unit by unit. Training continues meanwhile, and waits for a unit when it needs it. Only
this thread uses its process group, and it runs the same collectives after every step on every rank.
So a rank that evaluates or saves while others do not blocks no other rank. See Note [Rounds of
gathered weights] in ``ddp_bridge.py``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..errors import RankError
from ..movement.accelerators.base import Accelerator, Event
from .ddp import Replica

_BORDER = 16  # bytes; alignment of each parameter's rows, enough for every dtype

# Waits until the last step has updated these units of the engine, then calls a copy function.
Updated = Callable[[Collection[int], Callable[[], None]], None]
# Torch 2.13 introduced the first name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Jobs = queue.SimpleQueue[Callable[[], None] | None]


@dataclass(frozen=True)
class GatheredUnit:
    """The parameters that are gathered together.

    Attributes:
        units: the engine's units that hold this rank's rows.
        replicas: the whole parameters.
        rows: for each parameter, the memory of this rank's updated rows, if it has any.
    """

    units: Collection[int]
    replicas: Sequence[Replica]
    rows: Sequence[torch.Tensor | None]

    def offsets(self) -> list[int]:
        """Return where each parameter's rows begin in a rank's bytes, then the total size."""
        found = [0]
        for replica in self.replicas:
            nbytes = replica.of_rank(replica.whole, 0).nbytes  # no rank has more
            found.append(found[-1] - (-nbytes // _BORDER) * _BORDER)
        return found


class Round:
    """One pass over all units, in progress or finished."""

    def __init__(self, units: Sequence[GatheredUnit], over: Event) -> None:
        """
        Args:
            over: the end of compute's queued work with the previous weights.
        """
        self.units, self.over = units, over
        self.came = [threading.Event() for _ in units]
        self.events: list[Event | None] = [None] * len(units)
        self.error: BaseException | None = None


class Gatherer:
    """The thread that gathers units from all ranks.

    Attributes:
        failed: whether a round has failed.
    """

    def __init__(
        self, updated: Updated, accelerator: Accelerator, ranks: dist.ProcessGroup
    ) -> None:
        self._updated, self._accelerator, self._ranks = updated, accelerator, ranks
        self._size = dist.get_world_size(ranks)
        self.failed = False
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name="overspill-gather", daemon=True
        )

    def start(self) -> None:
        """Start the thread, so that rounds can begin."""
        self._thread.start()

    def prepared(self, units: Sequence[GatheredUnit]) -> tuple[Round, partial[None]]:
        """Return a round, and the call into C that begins it."""
        made = Round(units, self._accelerator.record())
        return made, partial(self._jobs.put, partial(self._gather_all, made))

    def wait(self, under_way: Round, number: int) -> None:
        """Order the calling thread's compute after the gathering of one unit of a round.

        Raises:
            OffloadError: the unit could not be gathered; the cause is attached.
        """
        under_way.came[number].wait()
        if under_way.error is not None:
            raise RankError(
                "another rank failed before it sent its updated weights "
                f"({type(under_way.error).__name__}: {under_way.error})"
            ) from under_way.error
        event = under_way.events[number]
        if event is not None:
            self._accelerator.wait(event)

    def remove(self) -> None:
        """Finish all rounds that were begun, and end the thread."""
        self._jobs.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _gather_all(self, under_way: Round) -> None:
        units, device = under_way.units, self._accelerator.device
        try:
            with self._accelerator.gather_stream():
                self._accelerator.wait(under_way.over)
                most = max((unit.offsets()[-1] for unit in units), default=0)
                mine = torch.empty(most, dtype=torch.uint8, device=device)
                theirs = torch.empty(self._size * most, dtype=torch.uint8, device=device)
                for number, unit in enumerate(units):
                    if unit.replicas:
                        self._gather(unit, mine, theirs)
                    under_way.events[number] = self._accelerator.record()
                    under_way.came[number].set()
        except BaseException as error:
            under_way.error, self.failed = error, True
        finally:
            for came in under_way.came:
                came.set()

    def _gather(self, unit: GatheredUnit, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        offsets = unit.offsets()
        nbytes = offsets[-1]
        parts = zip(unit.rows, offsets, strict=False)
        pairs = [(_typed(mine, at, rows), rows) for rows, at in parts if rows is not None]
        if pairs:
            self._updated(unit.units, lambda: _copy(pairs))
        received = theirs[: self._size * nbytes]
        _all_gather(received, mine[:nbytes], group=self._ranks)
        back = []
        for rank in range(self._size):
            part = received[rank * nbytes : (rank + 1) * nbytes]
            for replica, at in zip(unit.replicas, offsets, strict=False):
                rows = replica.of_rank(replica.whole, rank)
                if rows.numel():
                    back.append((rows, _typed(part, at, rows)))
        _copy(back)


def _typed(flat: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """Return flat bytes at an offset as a tensor of the shape and dtype of ``like``."""
    return flat[at : at + like.nbytes].view(like.dtype).view(like.shape)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not pairs:  # parameters without elements
        return
    with torch.no_grad():
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])


def _work(jobs: Jobs) -> None:
    """Run the queued jobs.

    Between jobs the thread holds no reference to an engine, so that an unused one can be collected.
    """
    while (job := jobs.get()) is not None:
        job()
        del job
