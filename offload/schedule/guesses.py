"""A limit on the bytes that mispredicted prefetches move."""

from __future__ import annotations

WASTE_SHARE = 1 / 32  # bytes that wrong guesses may move per byte that was needed

# Note [Limit on wrong guesses]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Prefetch follows the order recorded in the last step.  Where steps differ (layers are dropped at
# random, two tasks alternate), it moves copies that are evicted before anything uses them, and
# evicts copies that are needed sooner.  Results stay correct, but these bytes take up time of the
# links.  So prefetch pays for its mistakes out of a credit, one per kind of item and tier:
#
# * Each byte that was needed adds ``WASTE_SHARE`` bytes of credit.  A copy moved on demand counts
#   when it is moved, a prefetched copy when it is first used.
# * A prefetched copy that is dropped unused costs its size.  A copy that a prefetch evicted also
#   costs its size, if it is needed before the prefetched copy is used.
#   Neither is charged unless compute has left the recorded order since the guess was made: moves
#   that turn out unnecessary while the order holds are the price of moving early.
# * Without credit nothing is prefetched.  Below full credit, the credit must exceed the bytes of
#   all prefetched copies that are not used yet, because a misprediction is detected only later.
#   Demands are never refused.
#
# So in the long run wrong guesses move at most ``WASTE_SHARE`` of the needed bytes, in any order.
# The largest credit limits what they move at once: as much as is prefetched at a time.  While the
# order holds, nothing is charged and prefetch is not limited.  When a new order holds, a debt of a
# few copies is paid off within a few steps, and prefetch resumes.


class GuessCredit:
    """A credit of bytes that wrong guesses may still move.  See Note [Limit on wrong guesses]."""

    def __init__(self) -> None:
        self._most = self._left = 0.0
        self._unused_bytes = 0  # of prefetched copies that nothing has used yet

    def allow(self, nbytes: int) -> None:
        """Raise the largest credit to ``nbytes`` if it is smaller."""
        more = max(nbytes - self._most, 0)
        self._most += more
        self._left += more

    def __bool__(self) -> bool:
        """Return whether prefetch may guess."""
        return self._left >= self._most or self._left > self._unused_bytes

    def guess(self, nbytes: int) -> None:
        """Record a prefetched copy of ``nbytes`` that nothing has used yet."""
        self._unused_bytes += nbytes

    def end_guess(self, nbytes: int) -> None:
        """Record that a prefetched copy of ``nbytes`` is used now, or dropped."""
        self._unused_bytes -= nbytes

    def needed(self, nbytes: int) -> None:
        """Record that ``nbytes`` of moved data were needed."""
        self._left = min(self._most, self._left + WASTE_SHARE * nbytes)

    def wasted(self, nbytes: int) -> None:
        """Record that ``nbytes`` were moved unnecessarily."""
        self._left -= nbytes
