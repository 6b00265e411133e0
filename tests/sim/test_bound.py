"""The schedule against the bound: on a machine of set rates, whichever lane is the slowest.

The machine is so slow that what else runs here hardly matters; `python -m benchmarks bound` takes
longer and says more.
"""

from __future__ import annotations

import pytest

from benchmarks.bound import LANES, Slowness, measure
from benchmarks.model import Shape
from overspill.schedule.bounds import step_bound

SHALLOW = Shape(layers=16, width=128, heads=4, vocabulary=256, batch=1, tokens=16)


@pytest.mark.parametrize("lane", ["compute", "update"])
def test_backward_mode_is_near_its_bound(lane: str) -> None:
    seen = measure(SHALLOW, "backward", Slowness(lane, 0.8), steps=2)
    assert 0.98 < seen.ratio < 1.35, seen
    if lane == "compute":
        assert seen.covered > 0.8, seen


def test_step_mode_waits_for_all_compute_first() -> None:
    seen = measure(SHALLOW, "step", Slowness("update", 0.6), steps=2)
    assert seen.bound_s == pytest.approx(0.9)
    assert 0.98 < seen.ratio < 1.5, seen


def test_what_follows_the_last_gradients_adds_to_the_bound() -> None:
    seconds = {**dict.fromkeys(LANES, 1.0), "compute": 3.0}
    assert step_bound(seconds, "next_forward") == (3.0, "compute")
    assert step_bound({**seconds, "update": 2.5}, "backward") == (3.5, "update")
    assert step_bound({**seconds, "update": 2.5}, "backward", micro_steps=2)[0] == 4.5
    assert step_bound(seconds, "step") == (4.0, "write")
    assert step_bound({}, "step") == (0.0, None)
