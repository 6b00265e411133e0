"""Budgets, and the two memory arenas of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch

from ..errors import BudgetError
from ..facts.tier import Tier
from ..schedule.arena import Place

ANNEX_PIECE = 64 << 20


class Reservation:
    """Bytes taken from a budget until ``release``; ``renew`` takes them again."""

    def __init__(self, budget: Budget, nbytes: int) -> None:
        self.budget, self.nbytes = budget, nbytes
        self._held = True

    def release(self) -> None:
        """Return the bytes to the budget; a second call does nothing."""
        if self._held:
            self._held = False
            self.budget._give_back(self.nbytes)

    def renew(self) -> None:
        """Take the bytes again that ``release`` has returned, which nothing else has taken."""
        if not self._held:
            self._held = True
            self.budget._take_again(self.nbytes)


class Budget:
    """The bytes that one tier may hold. Nothing is allocated without a reservation."""

    def __init__(self, tier: Tier, nbytes: int) -> None:
        self.tier, self.budget_bytes = tier, nbytes
        self._lock = threading.Lock()
        self._held = self._peak = self._counted = 0

    @property
    def held_bytes(self) -> int:
        return self._held + self._counted

    def count(self, nbytes: int) -> None:
        """Set the bytes in use besides reservations; they may exceed the free room."""
        with self._lock:
            self._counted = nbytes
            self._peak = max(self._peak, self._held + nbytes)

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def reserve(self, nbytes: int, what: str, remedy: str) -> Reservation:
        """Reserve ``nbytes`` for ``what``.

        Raises:
            BudgetError: the tier has no room; ``remedy`` says what would help.
        """
        with self._lock:
            if self._held + nbytes > self.budget_bytes:
                raise BudgetError(
                    what, self.tier.value, nbytes, self.budget_bytes - self._held,
                    self.budget_bytes, remedy,
                )  # fmt: skip
            self._held += nbytes
            self._peak = max(self._peak, self._held)
        return Reservation(self, nbytes)

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._held -= nbytes

    def _take_again(self, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes
            self._peak = max(self._peak, self._held + self._counted)


class Annex:
    """Host memory beyond the arena, allocated as it is used, from its beginning."""

    def __init__(self, base: int, memory: torch.Tensor, take: Callable[[int, int], None]) -> None:
        """
        Args:
            base: the offset of its first place.
            memory: address space, none of whose pages is allocated yet.
            take: called with address and length of every piece before it is first used.
        """
        self._base, self._memory, self._take = base, memory, take
        self.taken_bytes = 0

    def has(self, place: Place) -> bool:
        return place.tier is Tier.HOST and place.offset >= self._base and place.nbytes > 0

    def bytes_of(self, place: Place) -> torch.Tensor:
        """Return the flat uint8 view of a place."""
        end = place.offset - self._base + place.nbytes
        while self.taken_bytes < end:
            piece = min(ANNEX_PIECE, self._memory.numel() - self.taken_bytes)
            self._take(self._memory.data_ptr() + self.taken_bytes, piece)
            self.taken_bytes += piece
        begin = place.offset - self._base
        return self._memory[begin : begin + place.nbytes]


class Arenas:
    """One flat uint8 tensor per memory tier, and typed views into them.

    Attributes:
        read_freed: while memory of the arenas is freed, returns a copy of a place in it, or
            ``None`` for a place without contents; else ``None``.
    """

    def __init__(
        self, host: torch.Tensor | None = None, device: torch.Tensor | None = None,
        annex: Annex | None = None,
    ) -> None:  # fmt: skip
        self.host, self.device, self.annex = host, device, annex
        self.read_freed: Callable[[Place], torch.Tensor | None] | None = None

    def bytes_of(self, place: Place) -> torch.Tensor:
        """Return the flat uint8 view of a place.

        While its memory is freed, this is a copy, which must only be read.
        """
        if self.read_freed is not None and (copy := self.read_freed(place)) is not None:
            return copy
        if self.annex is not None and self.annex.has(place):
            return self.annex.bytes_of(place)
        arena = self.device if place.tier is Tier.DEVICE else self.host
        assert arena is not None, f"no arena of {place.tier.value} memory"
        # Unlike ``narrow``, this keeps the GIL, which a busy training thread would not give back.
        return arena[place.offset : place.offset + place.nbytes]

    def typed(self, place: Place, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return ``numel`` elements of ``dtype`` at ``offset`` bytes of a place, flat."""
        nbytes = numel * dtype.itemsize
        assert offset + nbytes <= place.nbytes, f"{offset} + {nbytes} bytes of {place}"
        return self.bytes_of(Place(place.tier, place.offset + offset, nbytes)).view(dtype)

    def contain(self, address: int) -> bool:
        """Return whether an address is in one of the arenas."""
        return any(
            arena.data_ptr() <= address < arena.data_ptr() + arena.numel()
            for arena in (self.host, self.device)
            if arena is not None
        )


class MemoryWatch(Protocol):
    """Reports whether any tensor still views some memory."""

    @property
    def expired(self) -> bool: ...


class HeldMemory:
    """Owner of both arenas and their reservations; ``close`` frees them.

    Memory that a tensor still views (a weight that the user kept, a graph that was kept) is freed
    later, when the next engine opens after the last view is gone. If it were freed at once, a later
    access would crash the process.
    """

    _lingering: ClassVar[list[tuple[HeldMemory, Sequence[MemoryWatch]]]] = []

    def __init__(self) -> None:
        self.sweep()
        self.arenas = Arenas()
        self._reserved: list[Reservation] = []
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def sweep(cls) -> None:
        """Free memory of closed engines that no tensor views any more."""
        lingering, cls._lingering = cls._lingering, []
        for memory, watches in lingering:
            memory.close(watches)

    def _reserve(self, budget: Budget, nbytes: int, what: str, remedy: str) -> None:
        self._reserved.append(budget.reserve(nbytes, what, remedy))
        self._undo.append(self._reserved[-1].release)

    def take_host(self, budget: Budget, nbytes: int, allocate: Callable[[], torch.Tensor],
                  free: Callable[[], None]) -> None:  # fmt: skip
        """Reserve ``nbytes`` and allocate the host arena."""
        if nbytes:
            self._reserve(budget, nbytes, "the host arena", "raise host_memory")
            self._undo.append(free)
            self.arenas.host = allocate()

    def take_annex(self, allocate: Callable[[], Annex], free: Callable[[], None]) -> None:
        """Allocate the address space of host memory beyond the arena, but none of its pages."""
        self._undo.append(free)
        self.arenas.annex = allocate()

    def take_device(self, budget: Budget, nbytes: int, allocate: Callable[[], None],
                    free: Callable[[], None]) -> None:  # fmt: skip
        """Reserve and allocate the device arena, which may be freed and allocated again later."""
        if nbytes:
            self._reserve(budget, nbytes, "the device arena", "raise device_memory")
            self._undo.append(free)
            allocate()

    def take_unpacked(self, budget: Budget, nbytes: int, allocate: Callable[[int], torch.Tensor],
                      free: Callable[[], None]) -> None:  # fmt: skip
        """Reserve and allocate host memory for unpacked weights.

        Used if compute has no memory of its own.
        """
        self._reserve(budget, nbytes, "the arena of unpacked weights", "raise host_memory")
        self._undo.append(free)
        self.arenas.device = allocate(nbytes)

    def release(self, budget: Budget) -> None:
        """Release what is reserved in a budget: the memory is freed until ``renew``."""
        for each in self._reserved:
            if each.budget is budget:
                each.release()

    def renew(self, budget: Budget) -> None:
        """Reserve again what ``release`` has released."""
        for each in self._reserved:
            if each.budget is budget:
                each.renew()

    def close(self, watches: Sequence[MemoryWatch] = ()) -> None:
        """Free everything, in reverse order; a second call does nothing.

        Args:
            watches: watches of memory that may still be viewed. If any is, all is freed later.
        """
        alive = [watch for watch in watches if not watch.expired]
        if alive and self._undo:
            HeldMemory._lingering.append((self, alive))
            return
        while self._undo:
            self._undo.pop()()
        self.arenas = Arenas()
