"""Random machines that once went wrong, kept as they were drawn."""

from __future__ import annotations

import pytest

from tests.sim.test_residency_random import run

FOUND = {  # by (seed, steps)
    # A demand and an update took each other's room for ever.
    (5_010_411, 3): "an update's weights came to the device after it was queued, and stayed",
    # The first update in line found no room, and the demand that waited for it was refused.
    (6_004_972, 3): "a copy whose update others had been let before counted as used just now",
    # Gradients fetched for a later update and an arrival that held half of its room left the
    # first in line no hole that was long enough.
    (3_022_510, 2): "who waits for gradients' room holds none, and fetches go in order",
}


@pytest.mark.parametrize(("seed", "steps"), FOUND)
def test_it_no_longer_does(seed: int, steps: int) -> None:
    assert run(seed, steps) > 0, FOUND[seed, steps]
