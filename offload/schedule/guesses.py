"""Limit the bytes that mispredicted prefetches move."""

from __future__ import annotations

WASTE_SHARE = 1 / 32  # bytes that wrong guesses may move for each byte that was needed

# Note [Limit on wrong guesses]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Prefetch follows the order recorded in the last step.  Where steps differ (layers are dropped at
# random, two tasks alternate), it moves copies that are evicted before anything uses them, and
# evicts copies that are needed sooner.  Results are right, but these bytes take their time from the
# links.  So prefetch pays for its mistakes out of a credit, one for each kind of item and tier:
#
# * Each byte that was needed adds ``WASTE_SHARE`` bytes of credit: of a copy moved on demand when
#   it is moved, of a prefetched copy when it is first used.
# * A prefetched copy that is given up unused costs its size.  A copy that a prefetch evicted also
#   costs its size, if it is needed before the prefetched copy is used.
#   Neither is charged unless compute has left the recorded order since the guess was made: what is
#   moved in vain while the order holds is the price of moving early.
# * Without credit nothing is prefetched.  Below full credit, the credit must exceed the bytes of
#   all prefetched copies that are not used yet, because a misprediction is detected only later.
#   Demands are never refused.
#
# So wrong guesses move at most ``WASTE_SHARE`` of the needed bytes in the long run, whatever the
# order, and what they may move at once is limited by the largest credit: as much as is prefetched
# at a time.  While the order holds nothing is charged, so nothing changes.  When a new order
# holds, a debt of a few copies is paid within a few steps, and prefetch goes on.


class GuessCredit:
    """The bytes that wrong guesses may still move.  See Note [Limit on wrong guesses]."""

    def __init__(self) -> None:
        self._most = self._left = 0.0
        self._unused_bytes = 0  # of guesses

    def allow(self, nbytes: int) -> None:
        """Raise the largest credit to ``nbytes``, if it is less."""
        more = max(nbytes - self._most, 0)
        self._most += more
        self._left += more

    def __bool__(self) -> bool:
        """Return whether prefetch may guess."""
        return self._left >= self._most or self._left > self._unused_bytes

    def guess(self, nbytes: int) -> None:
        """Record a guess of so many bytes, which nothing has used yet."""
        self._unused_bytes += nbytes

    def end_guess(self, nbytes: int) -> None:
        """Record that such a guess is used, or given up."""
        self._unused_bytes -= nbytes

    def needed(self, nbytes: int) -> None:
        """Record that ``nbytes`` that were moved were needed."""
        self._left = min(self._most, self._left + WASTE_SHARE * nbytes)

    def wasted(self, nbytes: int) -> None:
        """Record that ``nbytes`` were moved in vain."""
        self._left -= nbytes
