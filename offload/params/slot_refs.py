"""Slots that autograd graphs still reference after compute has released them."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator

from ..private.torch_private import StorageWatch
from ..schedule.arena import Place
from ..schedule.messages import Freed, Held

# Note [References to slots]
# A slot must not be reused while a tensor points into it. Such tensors can outlive the unit's use:
# autograd saves some of them, and user code can keep ``p.detach()``. Each onload therefore makes a
# new storage object over the slot. When the unit is hidden, the engine drops its own reference and
# keeps only a ``StorageWatch``, a weak reference to the storage.
#
# If the watch has not expired when compute releases the unit, the residency machine gets a ``Held``
# for the slot, and does not reuse it. Before each later request, the machine gets a ``Freed`` for
# every slot whose watch has expired. So expired slots are found by looking, and no finalizer runs.
#
# An exception may come between any two lines. Each ``Held`` has a token of its own, so reporting
# the same slot twice is harmless. A slot is forgotten only after it was reported.


class SlotRefTracker:
    """Slots whose storages are watched, and which of them the machine knows.

    See Note [References to slots].
    """

    def __init__(self) -> None:
        self._tokens = itertools.count()
        self._held: dict[Held, StorageWatch] = {}
        self._told: set[Held] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, unit: int, place: Place, watch: StorageWatch) -> Held:
        """Watch a slot of the unit, whose storage may still be referenced."""
        held = Held(unit, place, next(self._tokens))
        self._held[held] = watch
        return held

    def look(self, held: Held) -> None:
        """Forget a slot without references, unless the machine knows of it."""
        watch = self._held.get(held)
        if watch is not None and watch.expired and held not in self._told:
            self._held.pop(held, None)

    def untold(self, units: Container[int]) -> tuple[Held, ...]:
        """Return the slots of these units that were not reported to the machine yet."""
        return tuple(h for h in self._held if h.unit in units and h not in self._told)

    def told(self, held: tuple[Held, ...]) -> None:
        """Record that the machine knows of these slots."""
        self._told.update(held)

    def freed(self) -> Iterator[Freed]:
        """Yield each slot whose references are gone, and forget it when the next one is requested.

        By then the caller has reported it.
        """
        for held, watch in list(self._held.items()):
            if watch.expired:
                yield Freed(held)
                self._told.discard(held)
                self._held.pop(held, None)

    @property
    def in_use(self) -> set[int]:
        """The units whose slots are still referenced."""
        return {held.unit for held, watch in self._held.items() if not watch.expired}

    @property
    def watches(self) -> list[StorageWatch]:
        """The watches of all slots that are still referenced."""
        return list(self._held.values())
