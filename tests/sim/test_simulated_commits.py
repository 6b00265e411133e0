"""Commits in simulated time: the machine saves what lives in memory, and a step writes that much
more; with updates in the background, the saves hide where there is room for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.planning.costs import Costs
from overspill.planning.planner import make_layout
from overspill.planning.simulate import Simulation
from overspill.schedule.commits import saved_bytes
from tests.sim.test_choice import RATES, draw

STEPS, WARM = 6, 3


def written(run: Simulation, update: str, *, commit: bool) -> float:
    """Bytes that a step writes, on average, after the first ones."""
    for _ in range(STEPS):
        run.step(1, update, commit=commit)
    began, ended = run.trace.steps[WARM - 1].finished_ns, run.trace.steps[-1].finished_ns
    spans = run.trace.spans(began, ended)
    return sum(s.nbytes for s in spans if s.lane == "write") / (STEPS - WARM)


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_a_step_that_is_committed_writes_what_lives_in_memory_too(update: str) -> None:
    saved = 0
    for seed in range(6):
        parts, budgets, needs = draw(seed)
        wanted = replace(needs, update=update, durable=True)
        layout, _, shortfalls = make_layout(parts, budgets, wanted)
        if shortfalls:
            continue
        costs = Costs.balanced(layout, RATES)
        alone = written(Simulation(layout, costs), update, commit=False)
        with_commits = Simulation(layout, costs)
        more = written(with_commits, update, commit=True) - alone
        assert more == pytest.approx(saved_bytes(layout), rel=0.1, abs=4096 * 64), seed
        saved += more > 0
        commits = [s for s in with_commits.trace.spans() if s.name == "commit"]
        assert len(commits) >= STEPS - 2, "one a step, but for those that have not landed"
    assert saved > 2
