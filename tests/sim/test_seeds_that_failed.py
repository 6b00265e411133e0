"""Random machines that once went wrong, kept as they were drawn."""

from __future__ import annotations

import pytest

from tests.sim.test_residency_random import run

FOUND = {
    # A demand and an update took each other's room for ever.
    5_010_411: "an update's weights came to the device after it was queued, and stayed",
    # The first update in line found no room, and the demand that waited for it was refused.
    6_004_972: "a copy whose update others had been let before counted as used just now",
}


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_it_no_longer_does(seed: int) -> None:
    assert run(seed, 3) > 0, FOUND[seed]
