"""What autograd saved, as graphs and the engine share it: one storage each, here or away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch

from ..schedule.messages import Fetch, Grant, Saved, SavedBytes, Signal, Turn, Used
from .accelerators.base import Event


class SavedStorage:
    """The bytes of one storage.

    Attributes:
        number: of its item.
        nbytes: of the whole storage.
        memory: flat uint8, where compute has it; ``None`` while it is away.
        event: up to which ``memory`` was filled, by compute or by a copy.
        fetched: whether a copy has brought it back.
    """

    __slots__ = ("__weakref__", "event", "fetched", "memory", "nbytes", "number")

    def __init__(self, number: int, memory: torch.Tensor) -> None:
        self.number, self.nbytes = number, memory.numel()
        self.memory: torch.Tensor | None = memory
        self.event: Event | None = None
        self.fetched = False

    def let_go(self) -> None:
        """It is away."""
        self.memory = self.event = None

    def bring(self, memory: torch.Tensor, event: Event) -> None:
        """It is in ``memory``, once ``event`` is over."""
        # Whoever finds the memory finds the event.
        self.event, self.fetched = event, True
        self.memory = memory


class SavedStore:
    """The storages that the machine knows, and how graphs speak with it about them.

    Attributes:
        here_bytes, away_bytes: with compute, and not there.
    """

    def __init__(
        self,
        put: Callable[[Signal], None],
        ask: Callable[[Callable[[int], Signal]], Grant],
        changed: Callable[[int, int], None],
    ) -> None:
        """
        Args:
            put: sends a signal, and goes on; never raises.
            ask: sends one, and waits for its grant.
            changed: told how many bytes compute has, and disks.
        """
        self._put, self._ask, self._changed = put, ask, changed
        # As long as a graph has them.
        self._known: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self.here_bytes = self.away_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, number: int) -> SavedStorage | None:
        """The storage of that number, if a graph has it."""
        return self._known.get(number)

    def let_go(self, number: int) -> None:
        """Compute's copy is of no more use."""
        if (saved := self._known.get(number)) is not None:
            saved.let_go()

    def counted(self, here: int, away: int, disk: int) -> None:
        """So many bytes are with compute, not there, and on disk."""
        self.away_bytes = away
        if here != self.here_bytes:
            self.here_bytes = here
            self._changed(here, disk)

    # -- for the graphs -------------------------------------------------------------------------

    def save(
        self, items: tuple[SavedBytes, ...], new: Iterable[SavedStorage], *, wait: bool = False
    ) -> None:
        """Tells what autograd has saved; ``wait``: returns when all keeps within its room.

        Raises:
            BudgetError: it cannot.
        """
        self._known.update((each.number, each) for each in new)
        if wait:
            self._ask(lambda ticket: Saved(items, ticket))
        else:
            self._put(Saved(items))

    def fetch(self, number: int) -> None:
        """Returns when the storage was with compute; it may have left again."""
        self._ask(lambda ticket: Fetch(number, ticket))

    def turn(self, backward: bool, room: int) -> None:
        """A backward begins, or has ended; from now on ``room`` bytes may stay with compute."""
        self._put(Turn(backward, room))

    def used(self, number: int) -> None:
        """Nothing needs the storage any more.  May be called where an object is collected."""
        self._put(Used((number,)))
