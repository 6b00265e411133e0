"""Slots that a graph has not let go when compute did."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.arena import Place
from ..schedule.messages import Freed
from .torch_private import StorageWatch


@dataclass(frozen=True)
class _Held:
    unit: int
    place: Place
    watch: StorageWatch


class HeldSlots:
    """Watches the storages over such slots, and tells of each once when it has expired."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, unit: int, place: Place, watch: StorageWatch) -> None:
        """A graph still has a storage over this slot of the unit."""
        self._held.append(_Held(unit, place, watch))

    def freed(self) -> list[Freed]:
        """What was let go since the last call."""
        if not self._held:
            return []
        freed = [held for held in self._held if held.watch.expired]
        self._held = [held for held in self._held if not held.watch.expired]
        return [Freed(held.unit, held.place) for held in freed]

    @property
    def watches(self) -> list[StorageWatch]:
        """Of all that are still held."""
        return [held.watch for held in self._held]
