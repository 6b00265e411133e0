"""Weights that each rank has updated a part of come to all of them, unit by unit, in one order, on
a thread of their own: training goes on meanwhile, and waits for a unit when it needs it.

That thread alone speaks on its group, and does the same after every step on every rank, whatever
the loop does there: a rank that evaluates, or saves, while others do not, keeps nobody waiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..errors import OffloadError
from ..movement.accelerators.base import Accelerator, Event
from .ddp import Replica

_BORDER = 16  # bytes; each parameter's rows begin on one, whatever their dtype

# Waits until the last step has updated units of the engine; has rows of theirs copied.
Updated = Callable[[Collection[int], Callable[[], None]], None]
# From torch 2.13 on it has the first name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Jobs = queue.SimpleQueue[Callable[[], None] | None]


@dataclass(frozen=True)
class GatheredUnit:
    """What comes together.

    ``units``: the engine's, which have this rank's rows.  ``replicas``: the whole parameters;
    ``rows``: of each, where this rank's updated rows are, if it has some.
    """

    units: Collection[int]
    replicas: Sequence[Replica]
    rows: Sequence[torch.Tensor | None]

    def offsets(self) -> list[int]:
        """Where each parameter's rows begin in a rank's bytes, and how many those are."""
        found = [0]
        for replica in self.replicas:
            nbytes = replica.of_rank(replica.whole, 0).nbytes  # no rank has more
            found.append(found[-1] - (-nbytes // _BORDER) * _BORDER)
        return found


class Round:
    """All units, once, on their way."""

    def __init__(self, units: Sequence[GatheredUnit], over: Event) -> None:
        """``over``: of what compute does yet with the weights as they were."""
        self.units, self.over = units, over
        self.came = [threading.Event() for _ in units]
        self.events: list[Event | None] = [None] * len(units)
        self.error: BaseException | None = None


class Gatherer:
    """Brings units to all ranks, when told to.  ``failed``: once it could not."""

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
        """From now on rounds may begin."""
        self._thread.start()

    def prepared(self, units: Sequence[GatheredUnit]) -> tuple[Round, partial[None]]:
        """A round, and what begins it: a call into C."""
        made = Round(units, self._accelerator.record())
        return made, partial(self._jobs.put, partial(self._gather_all, made))

    def wait(self, under_way: Round, number: int) -> None:
        """The calling thread's compute goes on with one of a round's units.

        Raises:
            OffloadError: it did not come; its cause is attached.
        """
        under_way.came[number].wait()
        if under_way.error is not None:
            raise OffloadError(
                "updated weights did not come from all ranks: one of them has failed, and its own "
                f"error says why ({type(under_way.error).__name__}: {under_way.error})"
            ) from under_way.error
        event = under_way.events[number]
        if event is not None:
            self._accelerator.wait(event)

    def remove(self) -> None:
        """Ends the thread, when all that was begun is over."""
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
    """Of a tensor's shape and dtype, in flat bytes."""
    return flat[at : at + like.nbytes].view(like.dtype).view(like.shape)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not pairs:  # parameters without elements
        return
    with torch.no_grad():
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])


def _work(jobs: Jobs) -> None:
    """Nothing of an engine is known between jobs, so that it can end when nobody has it."""
    while (job := jobs.get()) is not None:
        job()
        del job
