"""When a unit saves what autograd keeps of it: as it was measured, waits left out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from overspill.planning.save_timing import EVENLY, Burst, UnitForward, bursts_of

MIB = 1 << 20


def test_shares_are_of_compute_without_its_waits() -> None:
    forwards = [
        UnitForward(3, 1000, [(1000, MIB), (1500, 2 * MIB), (1900, MIB)]),
        UnitForward(-1, 2000, []),
    ]
    stalls = [(900, 950), (1600, 1800), (1700, 1850)]  # 250 within
    found = bursts_of(forwards, stalls)[3]
    assert [burst.part for burst in found] == [0.25, 0.5, 0.25]
    assert [burst.share for burst in found] == pytest.approx([0.0, 500 / 750, 650 / 750])


def test_a_unit_that_runs_twice_saves_in_both() -> None:
    once = [UnitForward(0, 0, [(50, MIB)]), UnitForward(1, 100, [])]
    again = [UnitForward(0, 1000, [(1050, MIB)]), UnitForward(-1, 1100, [])]
    assert bursts_of(once + again, [])[0] == (Burst(0.25, 0.5), Burst(0.75, 0.5))


def test_little_pieces_are_one_burst_no_larger_than_what_was_saved_at_once() -> None:
    saves = [(n, MIB) for n in range(100, 164)] + [(900, 40 * MIB), (901, 40 * MIB)]
    found = bursts_of([UnitForward(0, 0, saves), UnitForward(-1, 1000, [])], [])[0]
    assert sum(burst.part for burst in found) == pytest.approx(1.0)
    assert max(burst.part for burst in found) * 144 == pytest.approx(40)
    assert 4 <= len(found) <= 8
    assert all(a.share <= b.share for a, b in pairwise(found))


def test_what_began_before_all_was_there_counts_from_then() -> None:
    """A checkpoint keeps its inputs before the unit's weights have come."""
    found = bursts_of([UnitForward(0, 500, [(400, MIB)]), UnitForward(-1, 900, [])], [])
    assert found == {0: (Burst(0.0, 1.0),)}


def test_nothing_known_is_evenly() -> None:
    assert bursts_of([], []) == {} and bursts_of([UnitForward(0, 0, [])], []) == {}
    assert sum(burst.part for burst in EVENLY) == 1.0
