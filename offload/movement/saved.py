"""What autograd saved, as graphs and the engine share it: one storage each, here or away."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from ..schedule.messages import BackwardPhase, Fetch, Grant, Saved, SavedBytes, SavedDropped, Signal
from .accelerators.base import Event


class OffloadedStorage:
    """The bytes of one storage.

    Attributes:
        number: of its item.
        nbytes: of the whole storage.
        memory: flat uint8, where compute has it; ``None`` while it is away.
        event: up to which ``memory`` was filled, by compute or by a copy.
        coming: memory that copies back are filling, until the last one was started.
        filled: bytes of ``coming`` whose copies were started.
        fetched: whether a copy has brought it back.
        taken: whether compute has taken that copy.
    """

    __slots__ = (
        "__weakref__", "coming", "event", "fetched", "filled", "memory", "nbytes", "number",
        "taken",
    )  # fmt: skip

    def __init__(self, number: int, memory: torch.Tensor) -> None:
        self.number, self.nbytes = number, memory.numel()
        self.memory: torch.Tensor | None = memory
        self.coming: torch.Tensor | None = None
        self.filled = 0
        self.event: Event | None = None
        self.fetched = self.taken = False

    def let_go(self) -> None:
        """It is away."""
        self.memory = self.event = None

    def bring(self, event: Event) -> None:
        """Make ``coming`` the storage's memory; its contents are valid after ``event``."""
        # Whoever finds the memory finds the event.
        self.event, self.fetched, self.taken = event, True, False
        self.memory, self.coming, self.filled = self.coming, None, 0


class End(ref[Any]):
    """Goes to the machine when what holds a storage is collected.  C alone has it do so: a signal
    that came while Python code ran there would be lost, or what was to be told.

    Attributes:
        number: of the storage's item.
        told: whether the machine knows of it.
        counted: what whoever counts has counted of it, in bytes.
        beside: what comes to its end with it, on the machine's thread.
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
    """The storages that the machine knows, and how graphs speak with it about them.

    Attributes:
        here_bytes, away_bytes: with compute, and not there.
        most_here_bytes: the most that was with compute since the step began.
        ended: what was counted of those that have come to their end since.
    """

    def __init__(
        self,
        put: Callable[[Signal | End], None],
        ask: Callable[[Callable[[int], Signal]], Grant],
        changed: Callable[[int, int], None],
    ) -> None:
        """
        Args:
            put: sends a signal, and goes on; never raises, and is written in C.
            ask: sends one, and waits for its grant.
            changed: told how many bytes compute has, and disks.
        """
        self._put, self._ask, self._changed = put, ask, changed
        self._known: dict[int, ref[OffloadedStorage]] = {}  # until their end has come
        self._ends: dict[int, End] = {}
        self.here_bytes = self.away_bytes = self.most_here_bytes = 0
        self.ended: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, number: int) -> OffloadedStorage | None:
        """The storage of that number, if a graph has it."""
        known = self._known.get(number)
        return None if known is None else known()

    def let_go(self, number: int) -> None:
        """Compute's copy is of no more use."""
        if (saved := self.get(number)) is not None:
            saved.let_go()

    def counted(self, here: int, away: int, disk: int) -> None:
        """So many bytes are with compute, not there, and on disk."""
        self.away_bytes = away
        if here != self.here_bytes:
            self.here_bytes = here
            self.most_here_bytes = max(self.most_here_bytes, here)
            self._changed(here, disk)

    def has_ended(self, end: End) -> SavedDropped | None:
        """Nothing needs a storage any more: what to tell the machine, if it knows of it."""
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
        """Tells what autograd has saved; ``unit``: runs from now on, ``wait``: returns when all
        keeps within its room.

        Raises:
            BudgetError: it cannot.
        """
        for each in new:
            self._known[each.number] = ref(each)
            self._ends[each.number].told = True
        if wait:
            self._ask(lambda ticket: Saved(items, ticket))
        else:
            self._put(Saved(items, unit=unit))

    def fetch(self, number: int) -> None:
        """Returns when the storage was with compute; it may have left again."""
        self._ask(lambda ticket: Fetch(number, ticket))

    def turn(self, backward: bool, room: int, beside: int = 0) -> None:
        """A backward begins, or has ended; from now on ``room`` bytes may stay with compute, beside
        so many that nobody tells of."""
        self._put(BackwardPhase(backward, room, beside))

    def watch(self, holder: object, number: int, beside: object) -> End:
        """With ``holder`` the storage of that number comes to its end, and ``beside``."""
        end = self._ends[number] = End(holder, self._put, number, beside)
        return end

    @property
    def counted_bytes(self) -> int:
        """What was counted of all whose end was not taken from ``ended`` yet."""
        return sum([each.counted for each in list(self._ends.values())]) + sum(list(self.ended))
