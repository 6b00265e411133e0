"""The times within a unit's forward at which autograd saves tensors.

A unit saves in bursts: attention computes for long and saves little, the layers after it do the
reverse.  Whether a link keeps up depends on these times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..facts.trace import Interval, intersection, length, union

BURSTS = 4  # of a unit, unless a burst would become larger than the largest single save
GRID = 16  # parts of a unit's compute; saves within one part are one burst


class Burst(NamedTuple):
    """The fraction ``part`` of the saved bytes of a unit, saved when the fraction ``share`` of its
    forward is done."""

    share: float
    part: float


class UnitForward(NamedTuple):
    """A forward of a unit, from ``began_ns`` until the next unit began.

    ``saves`` has the time and the bytes of each save.  Times are of ``time.perf_counter_ns``.
    """

    unit: int
    began_ns: int
    saves: list[tuple[int, int]]


EVENLY = tuple(Burst((i + 0.5) / BURSTS, 1 / BURSTS) for i in range(BURSTS))
INPUTS = (Burst(0.0, 1.0),)  # a recomputed unit saves its inputs, at the beginning
ATTENTION = 0.5  # when a unit has computed its attention, about


def bursts_of(
    forwards: Sequence[UnitForward], stalls: Iterable[Interval]
) -> dict[int, tuple[Burst, ...]]:
    """Return the bursts of each unit from consecutive forwards.

    Args:
        forwards: in their order.  The last one only marks the end of the one before.
        stalls: intervals in which compute waited.
    """
    idle = union(stalls)
    saves: dict[int, list[tuple[int, int]]] = defaultdict(list)
    total_ns = Counter[int]()

    def computed_ns(since_ns: int, until_ns: int) -> int:
        span = [(since_ns, max(since_ns, until_ns))]
        return length(span) - length(intersection(idle, span))

    for forward, following in pairwise(forwards):
        unit, before_ns = forward.unit, total_ns[forward.unit]
        for at_ns, nbytes in forward.saves:
            saves[unit].append((before_ns + computed_ns(forward.began_ns, at_ns), nbytes))
        total_ns[unit] += computed_ns(forward.began_ns, following.began_ns)
    return {unit: _joined(found, max(1, total_ns[unit])) for unit, found in saves.items()}


def _joined(saves: Sequence[tuple[int, int]], total_ns: int) -> tuple[Burst, ...]:
    """Join saves that are close to each other in time."""
    whole = sum(nbytes for _, nbytes in saves)
    limit = max(whole / BURSTS, *(nbytes for _, nbytes in saves))
    bursts: list[tuple[float, int]] = []
    for at_ns, nbytes in saves:
        share = min(1.0, at_ns / total_ns)
        if bursts:
            last, had = bursts[-1]
            if int(last * GRID) == int(share * GRID) and had + nbytes <= limit:
                bursts[-1] = share, had + nbytes
                continue
        bursts.append((share, nbytes))
    while len(bursts) > BURSTS:
        near = [
            (after[0] - before[0], index)
            for index, (before, after) in enumerate(pairwise(bursts))
            if before[1] + after[1] <= limit
        ]
        if not near:
            break
        index = min(near)[1]
        share = bursts[index + 1][0]
        bursts[index : index + 2] = [(share, bursts[index][1] + bursts[index + 1][1])]
    return tuple(Burst(share, nbytes / whole) for share, nbytes in bursts)
