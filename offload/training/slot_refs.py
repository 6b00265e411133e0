"""Slots that a graph has not let go when compute did."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator

from ..schedule.arena import Place
from ..schedule.messages import Freed, Held
from .torch_private import StorageWatch


class SlotRefTracker:
    """Watches the storages over such slots, and tells of each when it has expired.

    An exception may come between any two lines: a slot may be told of twice, which its token makes
    harmless, but none is forgotten.
    """

    def __init__(self) -> None:
        self._tokens = itertools.count()
        self._held: dict[Held, StorageWatch] = {}
        self._told: set[Held] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, unit: int, place: Place, watch: StorageWatch) -> Held:
        """Somebody may still have a storage over this slot of the unit."""
        held = Held(unit, place, next(self._tokens))
        self._held[held] = watch
        return held

    def look(self, held: Held) -> None:
        """Forgets a slot that nobody has, if the machine does not know of it."""
        watch = self._held.get(held)
        if watch is not None and watch.expired and held not in self._told:
            self._held.pop(held, None)

    def untold(self, units: Container[int]) -> tuple[Held, ...]:
        """Slots of these units that the machine has not been told of."""
        return tuple(h for h in self._held if h.unit in units and h not in self._told)

    def told(self, held: tuple[Held, ...]) -> None:
        """The machine was told of them."""
        self._told.update(held)

    def freed(self) -> Iterator[Freed]:
        """What was let go.  Each is forgotten when the next is asked for: told of by then."""
        for held, watch in list(self._held.items()):
            if watch.expired:
                yield Freed(held)
                self._told.discard(held)
                self._held.pop(held, None)

    @property
    def watches(self) -> list[StorageWatch]:
        """Of all that are still held."""
        return list(self._held.values())
