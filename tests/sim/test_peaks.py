"""Bytes held and used against the plan and the simulator, over drawn machines."""

from __future__ import annotations

import pytest

from benchmarks.simulated import measure_drawn


def test_pools_hold_what_was_planned_and_peaks_are_those_simulated() -> None:
    """Simulated peak bytes equal the pools' own accounting: what is held to the byte, what is in
    use to the byte but where a late piece of work shifts a peak."""
    seen = [found for seed in range(4) if (found := measure_drawn(seed, 0.2, 2)) is not None]
    assert len(seen) >= 3
    for each in seen:
        for tier, nbytes in each.planned.items():
            assert each.held[tier] == nbytes
        for tier, nbytes in each.simulated.peak_bytes.items():
            if tier in each.used:
                assert each.used[tier] == pytest.approx(nbytes, rel=0.1)
                assert each.used[tier] <= each.held[tier] and nbytes <= each.held[tier]
    assert sum(each.same_peaks for each in seen) >= len(seen) // 2
