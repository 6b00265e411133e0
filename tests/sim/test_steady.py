"""What the simulator says of a step is the steady state, over the whole of its period."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.planning.choose import make_layout
from overspill.planning.costs import Costs
from overspill.planning.simulate import LINKS, Simulation
from overspill.planning.steady import simulate
from tests.sim.test_choice import RATES, draw


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_figures_are_those_of_many_steps_on_average(update: str) -> None:
    """Steps that take turns count alike, time and lanes as well as bytes."""
    turns = 0
    for seed in (*range(6), 7, 23, 55):  # some of these alternate
        parts, budgets, needs = draw(seed)
        layout, _, shortfalls = make_layout(parts, budgets, replace(needs, update=update))
        assert not shortfalls
        costs = Costs.balanced(layout, RATES)
        run = Simulation(layout, costs)
        lasted = [run.step(1, update) for _ in range(3 + 12)][3:]
        turns += max(lasted) > 1.02 * min(lasted)
        found = simulate(layout, costs, micro_steps=1, update=update)
        near = 0.01 if max(lasted) < 1.02 * min(lasted) else 0.04
        assert found.stats.step_s == pytest.approx(sum(lasted) / 12, rel=near), (seed, lasted)
        began = run.trace.steps[3].started_ns
        spans = run.trace.spans(began, run.trace.steps[-1].finished_ns)
        for lane in LINKS:
            moved = sum(s.nbytes for s in spans if s.lane == lane) / 12
            assert found.link_bytes[lane] == pytest.approx(moved, rel=0.05), (seed, lane)
            spanned = found.stats.lanes[lane].bytes
            assert found.link_bytes[lane] == pytest.approx(spanned, rel=0.05, abs=1)
    assert turns or update != "step", "some of these alternate"
