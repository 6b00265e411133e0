"""What lies in the extents of a drawn machine, by version: what a crash would leave."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from overspill.schedule.messages import Commit, Instruction, Key, Kind, Read, Update, Write
from overspill.schedule.residency import Residency


class Shadow:
    """Follows updates and writes; raises ``AssertionError`` where a commit would not be one cut."""

    def __init__(self, machine: Residency) -> None:
        self._machine, self._numbers = machine, itertools.count(1)
        self._now = dict.fromkeys(machine.layout.stored, 0)  # version of each; 0: as at the start
        self._kept: dict[tuple[Key, int], int] = {}  # version in an extent
        self._writing: dict[Write, int] = {}
        self._cut: dict[Key, int] | None = None
        self._committed: dict[Key, int] = dict(self._now)
        self.commits = 0

    def emitted(self, instructions: Sequence[Instruction]) -> None:
        """The machine has taken a signal, and answered."""
        for each in instructions:
            if isinstance(each, Update):
                self._update(each)
            elif isinstance(each, Write) and each.item in self._now:
                self._writing[each] = self._now[each.item]
            elif isinstance(each, Read) and each.item in self._now:
                seen = self._kept.get((each.item, each.role), 0)
                assert seen == self._now[each.item], f"{each} reads what is not the newest"
        if self._machine.snapshots.pending and self._cut is None:
            self._cut = dict(self._now)
        for each in instructions:
            if isinstance(each, Commit):
                self._check(each.table, self._cut)
        items = self._machine.items
        roles = [(item, items.of(item).roles.committed) for item in self._now]
        self._check(roles, self._committed)

    def _update(self, work: Update) -> None:
        for item in (Key(Kind.STATE, work.subgroup), Key(Kind.WEIGHTS, work.unit)):
            writes = [w for w in self._writing if w.item == item]
            assert not writes, f"{item} is updated while it is written"
            self._now[item] = next(self._numbers)

    def _check(self, table: Sequence[tuple[Key, int]], cut: dict[Key, int] | None) -> None:
        """What lies in the extents is the cut, all of it and nothing else."""
        assert cut is not None
        for item, role in table:
            kept = self._kept.get((item, role), 0)
            assert kept == cut[item], (
                f"{item}: version {kept} in the extent, {cut[item]} in the cut"
            )

    def done(self, work: object) -> None:
        """Before the machine is told."""
        if isinstance(work, Write) and work in self._writing:
            self._kept[work.item, work.role] = self._writing.pop(work)
        elif isinstance(work, Commit):
            assert self._cut is not None
            self._committed, self._cut = self._cut, None
            self.commits += 1

    def taken_back(self) -> None:
        """After ``AbortCommit``."""
        self._cut = None

    def edited(self, item: Key, role: int | None) -> None:
        """An item was changed between steps; ``role``: the extent that it was written to."""
        self._now[item] = next(self._numbers)
        if role is not None:
            self._kept[item, role] = self._now[item]

    def rolled_back(self) -> None:
        """After ``Rollback``."""
        self._now, self._cut = dict(self._committed), None
