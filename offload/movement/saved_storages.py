"""Storages that autograd saved, shared between graphs and the engine, with compute or offloaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from ..optim.activation_blocks import ActivationBlocks
from ..schedule.messages import BackwardPhase, Fetch, Grant, Saved, SavedBytes, SavedDropped, Signal
from .accelerators.base import Event


class OffloadedStorage:
    """The bytes of one storage.

    Attributes:
        number: the number of its item.
        nbytes: the size of the whole storage.
        blocks: packs it on its way out; ``None``: it moves as it is.
        memory: flat uint8, where compute has it; ``None`` while it is offloaded.
        event: the point at which ``memory`` was filled, by compute or by a copy.
        coming: memory that copies back are filling, until the last copy was started.
        filled: bytes of ``coming`` whose copies were started.
        fetched: whether a copy has brought the storage back.
        taken: whether compute has taken that copy.
    """

    __slots__ = (
        "__weakref__", "blocks", "coming", "event", "fetched", "filled", "memory", "nbytes",
        "number", "taken",
    )  # fmt: skip

    def __init__(self, number: int, memory: torch.Tensor) -> None:
        self.number, self.nbytes = number, memory.numel()
        self.blocks: ActivationBlocks | None = None
        self.memory: torch.Tensor | None = memory
        self.coming: torch.Tensor | None = None
        self.filled = 0
        self.event: Event | None = None
        self.fetched = self.taken = False

    def let_go(self) -> None:
        """Drop compute's copy; the bytes are on a lower tier."""
        self.memory = self.event = None

    def bring(self, event: Event | None) -> None:
        """Make ``coming`` the storage's memory; its contents are valid after ``event``."""
        # The event is set first, so that a reader who finds the memory also finds the event.
        self.event, self.fetched, self.taken = event, True, False
        self.memory, self.coming, self.filled = self.coming, None, 0


class End(ref[Any]):
    """A weak reference that tells the machine when the holder of a storage is collected.

    Its callback ``put`` is written in C. In a Python callback, a signal handler could raise: its
    exception would be lost, or the message to the machine.

    Attributes:
        number: the number of the storage's item.
        told: whether the machine knows the storage.
        counted: the bytes that the caller has counted for it.
        beside: an object that is released together with it, on the pump's thread.
    """

    __slots__ = ("beside", "counted", "number", "told")
    beside: object
    counted: int
    number: int
    told: bool

    def __new__(
        cls, holder: object, put: Callable[[Signal | End], None], number: int, beside: object
    ) -> End:
        self = super().__new__(cls, holder, put)
        self.number, self.told, self.counted, self.beside = number, False, 0, beside
        return self

    def __init__(self, holder: object, *_: object) -> None:
        super().__init__(holder)  # type: ignore[call-arg]


class SavedStore:
    """The storages that the machine knows, and the graphs' interface to the machine for them.

    Attributes:
        here_bytes, away_bytes: bytes with compute, and offloaded.
        most_here_bytes: the peak of ``here_bytes`` since the step began.
        ended: the counted bytes of storages that have ended and were not subtracted yet.
    """

    def __init__(
        self,
        put: Callable[[Signal | End], None],
        ask: Callable[[Callable[[int], Signal]], Grant],
        changed: Callable[[int, int], None],
    ) -> None:
        """
        Args:
            put: sends a signal without waiting; never raises, and is written in C.
            ask: sends a signal and waits for its grant.
            changed: called with the bytes that compute has, and disks have.
        """
        self._put, self._ask, self._changed = put, ask, changed
        self._known: dict[int, ref[OffloadedStorage]] = {}  # until their ``End`` is handled
        self._ends: dict[int, End] = {}
        self.here_bytes = self.away_bytes = self.most_here_bytes = 0
        self.ended: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, number: int) -> OffloadedStorage | None:
        """Return the storage of that number, if a graph still holds it."""
        known = self._known.get(number)
        return None if known is None else known()

    def let_go(self, number: int) -> None:
        """Drop compute's copy of a storage."""
        if (saved := self.get(number)) is not None:
            saved.let_go()

    def counted(self, here: int, away: int, disk: int) -> None:
        """Record the bytes that are with compute, offloaded, and on disk."""
        self.away_bytes = away
        if here != self.here_bytes:
            self.here_bytes = here
            self.most_here_bytes = max(self.most_here_bytes, here)
            self._changed(here, disk)

    def has_ended(self, end: End) -> SavedDropped | None:
        """Forget a storage that nothing needs any more; return a signal if the machine knows it."""
        self._ends.pop(end.number, None)
        self._known.pop(end.number, None)
        self.ended.append(end.counted)
        return SavedDropped((end.number,)) if end.told else None

    # -- for the graphs -------------------------------------------------------------------------

    def save(
        self,
        items: tuple[SavedBytes, ...],
        new: Iterable[OffloadedStorage],
        *,
        unit: int | None = None,
        wait: bool = False,
    ) -> None:
        """Report the storages that autograd has saved.

        Args:
            unit: the unit that runs from now on.
            wait: return only when everything saved fits in its room.

        Raises:
            BudgetError: it cannot fit.
        """
        for each in new:
            self._known[each.number] = ref(each)
            self._ends[each.number].told = True
        if wait:
            self._ask(lambda ticket: Saved(items, ticket))
        else:
            self._put(Saved(items, unit=unit))

    def fetch(self, number: int) -> None:
        """Wait until the storage has been with compute; it may have left again."""
        self._ask(lambda ticket: Fetch(number, ticket))

    def turn(self, backward: bool, room: int, beside: int = 0) -> None:
        """Report that a backward pass has begun or ended.

        Args:
            backward: whether one runs now.
            room: bytes that may stay with compute from now on.
            beside: bytes that stay there in addition, which are not reported.
        """
        self._put(BackwardPhase(backward, room, beside))

    def watch(self, holder: object, number: int, beside: object) -> End:
        """Create the ``End`` of a storage, which ends when ``holder`` is collected.

        ``beside`` is released with it.
        """
        end = self._ends[number] = End(holder, self._put, number, beside)
        return end

    @property
    def counted_bytes(self) -> int:
        """The counted bytes of all storages whose end was not taken from ``ended`` yet."""
        return sum([each.counted for each in list(self._ends.values())]) + sum(list(self.ended))
