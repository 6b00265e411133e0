"""Snapshots: a consistent state over all tiers at the end of a step, and how it is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..facts.tier import Tier
from .items import Items, Roles
from .layout import Layout
from .messages import Commit, Instruction, Key, Kind

SAVES_AT_ONCE = 2  # background writes in progress: demand reads must not queue behind many

# Note [Snapshots and commits]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Every stored item has two extents on disk (``Roles``): the committed one belongs to the last
# commit, and the working one takes all writes.  A snapshot is one consistent state of all items,
# taken when no update runs.  It becomes a commit once every changed item is in its working extent
# and the commit record names these extents.
#
# * An item that lives on disk is in its working extent already.  The next update of it must not
#   overwrite this extent before the commit is durable, so it is blocked until then.
# * An item that lives in memory and has changed must be written (``_save``) before its next update
#   changes it.  An update that comes sooner waits only for this write, which then goes first.
#
# The commit record also needs metadata that is known only later, when the training loop begins the
# next forward (scheduler and loop state).  The snapshot is *sealed* with its number then.  When all
# writes have ended and it is sealed, ``Commit`` is emitted.  After that the roles swap: the working
# extents become the committed ones.
#
# If the loop edits weights before the seal, ``take_back`` gives up the snapshot, and the edited
# state joins a later one.  If the commit fails before its record was begun, the previous commit
# stays valid.  ``rollback`` makes the committed extents the newest again.


class Snapshots:
    """The snapshot in progress, if any; one at a time.  See Note [Snapshots and commits].

    Attributes:
        dirty: items in memory that changed since they were last saved.
        pending: whether a snapshot is in progress.
        spoiled: units with non-finite values; while there are any, nothing is committed.
        sealed: the number of the metadata of the snapshot, once known.
        blocked: items that no update may change yet.
    """

    def __init__(self, layout: Layout, items: Items, emit: Callable[[Instruction], None]) -> None:
        self._emit, self._items = emit, items
        self._stored = layout.stored
        self._in_memory: dict[Key, Tier] = {}  # tiers of the items that a commit must save
        for key in layout.stored:
            tier, place = layout.home(key)
            if place is not None and (key.kind is Kind.STATE or tier is Tier.HOST):
                self._in_memory[key] = place.tier
        self.dirty: set[Key] = set()
        self.pending = False
        self._stale: set[Key] = set()  # items to read again after a rollback
        self.spoiled: set[int] = set()
        self.sealed: int | None = None
        self.blocked: set[Key] = set()
        self._changed: dict[Key, int] = {}
        self._unsaved: deque[Key] = deque()
        self._saving: set[Key] = set()
        self._committing = False

    # -- a snapshot -----------------------------------------------------------------------------

    def begin(self, sealed: int | None) -> None:
        """Begin a snapshot of the current state; ``sealed``: number of its metadata, if known."""
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
        """Record that an item is about to change, if it lives in memory."""
        if item in self._in_memory:
            self.dirty.add(item)

    def blocks(self, item: Key) -> bool:
        """Return whether an update of the item must wait; if so, start the write it waits for."""
        if item not in self.blocked:
            return False
        if item in self._unsaved:
            self._unsaved.remove(item)
            self._save(item)
        return True

    def advance(self) -> None:
        """Write unsaved items; once all are written and the snapshot is sealed, commit it."""
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
        """Record that one of the snapshot's writes has ended."""
        self._changed[item] = self._roles(item).newest
        self._saving.discard(item)
        self.blocked.discard(item)

    def _roles(self, item: Key) -> Roles:
        return self._items.of(item).roles

    def _table(self) -> tuple[tuple[Key, int], ...]:
        """Return every stored item with its extent in the snapshot."""
        return tuple(
            (item, self._changed.get(item, self._roles(item).committed)) for item in self._stored
        )

    def committed(self) -> None:
        """End the snapshot, which is durable: its extents become the committed ones."""
        for item, role in self._changed.items():
            self._roles(item).committed = role
        self._end()

    def refused(self) -> None:
        """Handle a commit that failed before its record was begun: the previous commit stays the
        last one, and everything in this snapshot is newer."""
        self.dirty.update(item for item in self._changed if item in self._in_memory)
        self._end()

    def _end(self) -> None:
        self.pending = self._committing = False
        self.sealed = None
        self._changed.clear()
        self.blocked.clear()

    def newer(self) -> bool:
        """Return whether anything is newer than the last commit."""
        return bool(self.pending or self.dirty) or any(
            roles.newest != roles.committed for roles in map(self._roles, self._stored)
        )

    def adopt(self, item: Key, role: int) -> None:
        """Set the extent that a reopened store has for an item."""
        roles = self._roles(item)
        roles.newest = roles.committed = role
        self.dirty.discard(item)

    # -- abort and rollback ---------------------------------------------------------------------

    def take_back(self) -> None:
        """Give up the snapshot in progress, since its state is about to be edited.

        The edited state joins a later one.  The snapshot must not be sealed, and nothing may move.
        """
        assert self.sealed is None and not self._saving, "the cut is being written"
        self.dirty.update(self._unsaved)
        self._unsaved.clear()
        self._end()

    def rolled_back(self) -> None:
        """Record that all items that ``rollback`` returned have been read."""
        self._stale = set()

    def rollback(self) -> list[Key]:
        """Forget the snapshot and all that is newer than the last commit, while nothing moves.

        Returns:
            The items that must be read again: all in memory, and those on disk that were newer.
        """
        assert not self._saving and not self._committing, "a commit is under way"
        # All items in memory: an interrupted edit may have changed some without a signal.
        stale = self._stale | set(self._in_memory)
        for item in self._stored:
            roles = self._roles(item)
            if roles.newest != roles.committed:
                roles.newest = roles.committed
                stale.add(item)
        self._stale = stale  # kept until all are read, since an exception may interrupt that
        self.dirty.clear()
        self._unsaved.clear()
        self._end()
        self.spoiled.clear()
        return [item for item in self._stored if item in stale]
