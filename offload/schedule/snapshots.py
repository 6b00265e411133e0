"""Cuts: one cut over all tiers at the end of a step, and who must wait until it is durable.

What lives in memory is written to its working extent while it is immutable, that is until the next
update of it; an update that comes sooner waits for that one write alone.  What lives on disk is in
its working extent already, and must not be written again before the record is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..facts.tier import Tier
from .items import Items, Roles
from .layout import Layout
from .messages import Commit, Instruction, Key, Kind

SAVES_AT_ONCE = 2  # in the background: demand reads must not queue behind many


class Snapshots:
    """The cut that is under way, if any; one at a time."""

    def __init__(self, layout: Layout, items: Items, emit: Callable[[Instruction], None]) -> None:
        self._emit, self._items = emit, items
        self._stored = layout.stored
        self._in_memory: dict[Key, Tier] = {}  # where those are that a commit must save
        for key in layout.stored:
            tier, place = layout.home(key)
            if place is not None and (key.kind is Kind.STATE or tier is Tier.HOST):
                self._in_memory[key] = place.tier
        self.dirty: set[Key] = set()  # in memory, changed since it was last saved
        self.pending = False
        self._stale: set[Key] = set()  # to be read again after a rollback
        self.spoiled: set[int] = set()  # units that hold values that are not finite
        self.sealed: int | None = None
        self.blocked: set[Key] = set()
        self._changed: dict[Key, int] = {}
        self._unsaved: deque[Key] = deque()
        self._saving: set[Key] = set()
        self._committing = False

    # -- a cut ----------------------------------------------------------------------------------

    def begin(self, sealed: int | None) -> None:
        """All that is current now is one cut; ``sealed``: the number of its facts, if known."""
        assert not self.pending, "one commit at a time"
        assert not self.spoiled, "what is not finite is not committed"
        self.pending, self.sealed = True, sealed
        self._changed = {
            item: roles.newest
            for item in self._stored
            if (roles := self._roles(item)).newest != roles.committed
        }
        self._unsaved = deque(item for item in self._stored if item in self.dirty)
        self.dirty.clear()
        self.blocked = {item for item in self._changed if item not in self._in_memory}
        self.blocked.update(self._unsaved)

    def change(self, item: Key) -> None:
        """An update is about to change what lives in memory."""
        if item in self._in_memory:
            self.dirty.add(item)

    def blocks(self, item: Key) -> bool:
        """Whether an update of the item must wait; what it waits for then goes first."""
        if item not in self.blocked:
            return False
        if item in self._unsaved:
            self._unsaved.remove(item)
            self._save(item)
        return True

    def advance(self) -> None:
        """Writes what is unsaved; when all is, and the facts are sealed, the record."""
        if not self.pending:
            return
        while self._unsaved and len(self._saving) < SAVES_AT_ONCE:
            self._save(self._unsaved.popleft())
        if self.sealed is not None and not self._saving and not self._committing:
            self._committing = True
            self._emit(Commit(self.sealed, self._table()))

    def _save(self, item: Key) -> None:
        self._saving.add(item)
        self._items.write(self._items.of(item), self._in_memory[item], saves=True)

    def saved(self, item: Key) -> None:
        """One of the cut's writes has ended."""
        self._changed[item] = self._roles(item).newest
        self._saving.discard(item)
        self.blocked.discard(item)

    def _roles(self, item: Key) -> Roles:
        return self._items.of(item).roles

    def _table(self) -> tuple[tuple[Key, int], ...]:
        """Every item and the extent that the cut has it in."""
        return tuple(
            (item, self._changed.get(item, self._roles(item).committed)) for item in self._stored
        )

    def committed(self) -> None:
        """The record is durable: the roles turn."""
        for item, role in self._changed.items():
            self._roles(item).committed = role
        self._end()

    def refused(self) -> None:
        """Handle a commit that failed before its record was begun: the previous commit stays the
        last one, and everything in this cut is newer than it."""
        self.dirty.update(item for item in self._changed if item in self._in_memory)
        self._end()

    def _end(self) -> None:
        self.pending = self._committing = False
        self.sealed = None
        self._changed.clear()
        self.blocked.clear()

    def newer(self) -> bool:
        """Whether anything is newer than the last commit."""
        return bool(self.pending or self.dirty) or any(
            roles.newest != roles.committed for roles in map(self._roles, self._stored)
        )

    def adopt(self, item: Key, role: int) -> None:
        """A store that was opened again has the item in this extent."""
        roles = self._roles(item)
        roles.newest = roles.committed = role
        self.dirty.discard(item)

    # -- back -----------------------------------------------------------------------------------

    def take_back(self) -> None:
        """The cut that is under way is not made: what it holds is about to be edited, and will be
        in another.  Its facts are not known, and nothing moves."""
        assert self.sealed is None and not self._saving, "the cut is being written"
        self.dirty.update(self._unsaved)
        self._unsaved.clear()
        self._end()

    def rolled_back(self) -> None:
        """All that ``rollback`` said has been read."""
        self._stale = set()

    def rollback(self) -> list[Key]:
        """Forgets the cut and all that is newer than the last commit.  Nothing may be under way.

        Returns:
            What lives in memory and must be read again.
        """
        assert not self._saving and not self._committing, "a commit is under way"
        # All that lives in memory: an edit that was interrupted may have told of nothing yet.
        stale = self._stale | set(self._in_memory)
        for item in self._stored:
            roles = self._roles(item)
            if roles.newest != roles.committed:
                roles.newest = roles.committed
                stale.add(item)
        self._stale = stale  # until all is read: an exception may come before
        self.dirty.clear()
        self._unsaved.clear()
        self._end()
        self.spoiled.clear()
        return [item for item in self._stored if item in stale]
