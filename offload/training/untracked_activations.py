"""Steps in which nothing of what autograd saves has to leave, so that nobody looks at it."""

from __future__ import annotations

import weakref

MARGIN = 1.25  # times what the largest step saved that left room for it is set aside
SHARE = 2  # such a part of the room at most


class UntrackedStep:
    """A forward and its backward in which what is saved is counted and no more.  All that is saved
    meanwhile holds it.

    Attributes:
        left: bytes that may yet be saved so.
    """

    __slots__ = ("__weakref__", "left")

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes


class UntrackedActivations:
    """Where steps leave most of the room empty, the next one is an ``UntrackedStep``, with a part
    of the room set aside for what is saved then.  Once that is more, it is looked at again.

    Attributes:
        rest: the present one.
        aside_bytes: of the room, as long as a graph has what was saved in a rest.
        passed_bytes: that were looked at in this step, storages as often as they were saved.
        share: of such bytes, what autograd had at once in the last step that was looked at.
    """

    def __init__(self) -> None:
        self.rest: UntrackedStep | None = None
        self.aside_bytes = self.passed_bytes = 0
        self._last: weakref.ref[UntrackedStep] | None = None
        self._most = 0  # that was ever set aside
        self.share = 1.0

    def take(self, nbytes: int) -> UntrackedStep | None:
        """What to hold with so many bytes that stay as they are; ``None``: they are to be looked
        at, as is all from then on."""
        rest = self.rest
        if rest is not None:
            rest.left -= nbytes
            if rest.left < 0:
                rest = self.rest = None
        return rest

    def backward_begins(self, saved_bytes: int) -> int:
        """Bytes that autograd has of what was not looked at, about as many as there are, or all
        that was set aside for it where a part was.  ``saved_bytes``: of all that was."""
        if self.rest is not None:
            return round(self.share * (self.aside_bytes - self.rest.left))
        if not self.aside_bytes and self.passed_bytes:
            self.share = min(1.0, saved_bytes / self.passed_bytes)
        return self.aside_bytes

    def step_over(self, room_bytes: int, *, quiet: bool) -> None:
        """Decides on the next step; ``quiet``: nothing has left in this one.  After one that was
        looked at in part comes one that is as a whole."""
        in_part = self.aside_bytes > 0 and self.rest is None
        saved, self.passed_bytes = self.passed_bytes, 0
        if self.rest is not None:
            saved += self.aside_bytes - self.rest.left
            self.rest = None
        if self._last is not None and self._last() is not None:
            return  # a graph has been kept
        self._last, self.aside_bytes = None, 0
        if quiet and not in_part and 0 < MARGIN * saved <= room_bytes // SHARE:
            self._most = min(room_bytes // SHARE, max(self._most, int(MARGIN * saved)))
            self.aside_bytes, self.rest = self._most, UntrackedStep(self._most)
            self._last = weakref.ref(self.rest)
