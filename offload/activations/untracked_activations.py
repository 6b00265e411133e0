"""Steps whose activations are not tracked, because none of them has to be offloaded."""

from __future__ import annotations

import weakref

MARGIN = 1.25  # times what the largest step saved is set aside
SHARE = 2  # at most ``1 / SHARE`` of the room is set aside


class UntrackedStep:
    """A forward and its backward in which saved tensors are only counted.

    All tensors that are saved meanwhile hold a reference to it.

    Attributes:
        left: bytes that may still be saved untracked.
    """

    __slots__ = ("__weakref__", "left")

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes


class UntrackedActivations:
    """The decision which steps go untracked.

    If a step leaves most of the room empty, the next one is an ``UntrackedStep``, and a part of the
    room is set aside for its activations. If they exceed it, tracking starts again.

    Attributes:
        rest: the current untracked step, or ``None``.
        aside_bytes: the part of the room that is set aside, for as long as a graph holds untracked
            activations.
        passed_bytes: bytes tracked in this step, counting a storage each time it is saved.
        share: the share of these bytes that autograd held at once, in the last tracked step.
    """

    def __init__(self) -> None:
        self.rest: UntrackedStep | None = None
        self.aside_bytes = self.passed_bytes = 0
        self._last: weakref.ref[UntrackedStep] | None = None
        self._most = 0  # the most that was ever set aside
        self.share = 1.0

    def take(self, nbytes: int) -> UntrackedStep | None:
        """Count bytes that stay untracked, and return what they must hold.

        ``None``: they must be tracked, like everything after them.
        """
        rest = self.rest
        if rest is not None:
            rest.left -= nbytes
            if rest.left < 0:
                rest = self.rest = None
        return rest

    def backward_begins(self, saved_bytes: int) -> int:
        """Return roughly how many untracked bytes autograd holds.

        If a step was tracked only in part, these are all bytes that were set aside for it.
        ``saved_bytes``: the tracked bytes that autograd holds.
        """
        if self.rest is not None:
            return round(self.share * (self.aside_bytes - self.rest.left))
        if not self.aside_bytes and self.passed_bytes:
            self.share = min(1.0, saved_bytes / self.passed_bytes)
        return self.aside_bytes

    def step_over(self, room_bytes: int, *, quiet: bool) -> None:
        """Decide on the next step; ``quiet``: nothing was offloaded in this one.

        A step that was tracked in part is followed by one that is tracked as a whole.
        """
        in_part = self.aside_bytes > 0 and self.rest is None
        saved, self.passed_bytes = self.passed_bytes, 0
        if self.rest is not None:
            saved += self.aside_bytes - self.rest.left
            self.rest = None
        if self._last is not None and self._last() is not None:
            return  # a graph was kept
        self._last, self.aside_bytes = None, 0
        if quiet and not in_part and 0 < MARGIN * saved <= room_bytes // SHARE:
            self._most = min(room_bytes // SHARE, max(self._most, int(MARGIN * saved)))
            self.aside_bytes, self.rest = self._most, UntrackedStep(self._most)
            self._last = weakref.ref(self.rest)
