"""The policy for optimizer state: records are read for their update, ahead of it if possible, and
written back."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import islice

from ..facts.tier import Tier
from .arena import Place
from .items import Copy, Item, Items, Move
from .layout import Layout
from .messages import Key, Kind
from .order import NEVER


class Records:
    """The state records, one per subgroup.

    A record in a slot is held from when an update claims it until it is written back.  Otherwise it
    is clean, and was only read ahead.
    """

    def __init__(self, layout: Layout, items: Items) -> None:
        self._layout, self._items = layout, items
        items.govern(Kind.STATE, self)
        self._records: list[Item] = []
        for subgroup in layout.records:
            key = Key(Kind.STATE, subgroup.index)
            item = Item(key, subgroup.nbytes, pair=layout.durable)
            _, place = layout.home(key)
            if place is not None:
                item.fix(place)
            else:
                item.stored = True  # before the first write it reads as zeros
            items.add(item)
            self._records.append(item)
        self._coming: deque[int] = deque()  # records on disk, in the order expected next
        self._turns: dict[int, int] = {}  # positions of these in that order

    # -- questions ------------------------------------------------------------------------------

    def _copy(self, number: int) -> Copy | None:
        item = self._records[number]
        return item.host or item.device

    def ready(self, number: int) -> Place | None:
        """Return the place of a record in memory; ``None`` if it has not arrived."""
        copy = self._copy(number)
        return copy.place if copy is not None and copy.valid else None

    def moves(self, number: int) -> bool:
        """Return whether the record lives on disk."""
        return self._layout.home(self._records[number].key)[0] is Tier.NVME

    # -- the policy of the kind -----------------------------------------------------------------

    def next_use(self, item: Item, tier: Tier) -> int:
        return self._turns.get(item.key.number, NEVER)

    def may_go(self, item: Item, tier: Tier) -> bool:
        return True

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        return item.key.number in spare

    def moved(self, item: Item, work: Move) -> None:
        return None

    # -- for updates ----------------------------------------------------------------------------

    def claim(self, number: int) -> bool:
        """Hold a record for an update, and start to read it if needed.

        Returns:
            ``False`` if there is no room yet; then nothing is held.
        """
        if self._copy(number) is None and not self._fetch(number, ()):
            return False
        copy = self._copy(number)
        assert copy is not None
        self._items.use(self._records[number])
        copy.holds += 1
        return True

    def updated(self, number: int) -> bool:
        """Handle the end of a record's update: start to write it back if it lives on disk.

        Returns:
            Whether a write was started.
        """
        copy, moves = self._copy(number), self.moves(number)
        assert copy is not None
        copy.holds -= 1
        self._records[number].stored = False
        if moves:
            self._items.write(self._records[number])
        return moves

    def _fetch(self, number: int, spare: Container[int], *, guess: bool = False) -> bool:
        item = self._records[number]
        if self._items.make_room(item, Tier.HOST, -1, spare, guess=guess) is None:
            return False
        self._items.read(item)
        return True

    # -- reading ahead --------------------------------------------------------------------------

    def expect(self, numbers: Iterable[int]) -> None:
        """Set the order in which the next step is expected to use records."""
        self._coming = deque(number for number in numbers if self.moves(number))
        self._turns = {number: turn for turn, number in enumerate(self._coming)}

    def passed(self, unit_updated: Container[int]) -> None:
        """Stop expecting records, up to the first one whose unit is not in ``unit_updated``."""
        records = self._layout.records
        while self._coming and records[self._coming[0]].unit in unit_updated:
            del self._turns[self._coming.popleft()]

    def prefetch(self) -> None:
        """Read the records expected next into slots that no update has claimed."""
        if not self._coming:
            return
        first = list(islice(self._coming, self._layout.regions.state_slots))
        for number in first:
            if self._copy(number) is None and not self._fetch(number, first, guess=True):
                return

    def drop_unused(self) -> None:
        """Drop all records that were only read ahead.  Nothing may be in progress."""
        for item in self._records:
            if item.host is not None and not item.host.fixed:
                self._items.drop(item, Tier.HOST)
