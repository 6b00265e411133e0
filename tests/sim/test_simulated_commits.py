"""Commits in simulated time: the machine saves what lives in memory, and a step writes that much
more; with updates in the background, the saves hide where there is room for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.planning.choose import run_steps
from overspill.planning.costs import Costs
from overspill.planning.planner import make_layout
from overspill.planning.simulate import Simulation
from overspill.schedule.layout import Layout
from tests.sim.test_choice import RATES, draw

STEPS, WARM = 6, 3


def saved_bytes(layout: Layout) -> int:
    """Bytes of a commit beside what steps write anyway: what is trained and lives in memory."""
    total = 0
    for unit, home in zip(layout.units, layout.homes, strict=True):
        if unit.trainable:
            places = (home.host_place, *home.state_places)
            total += sum(place.nbytes for place in places if place is not None)
    return total


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
        wanted = replace(needs, update=update, commit_every=1)
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


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_a_plan_knows_what_commits_cost(update: str) -> None:
    """Where the disk is slow, commits cost time; one in four steps costs a quarter of it."""
    slow = replace(RATES, disk_write_bytes_s=RATES.disk_write_bytes_s / 20)
    dearer = 0
    for seed in range(6):
        parts, budgets, needs = draw(seed)
        wanted = replace(needs, update=update, commit_every=1)
        layout, _, shortfalls = make_layout(parts, budgets, wanted)
        if shortfalls:
            continue
        costs = Costs.balanced(layout, RATES)
        costs = replace(costs, rates=slow)
        never, fourth, each = (
            run_steps(layout, costs, replace(wanted, commit_every=every)) for every in (0, 4, 1)
        )
        more = saved_bytes(layout)
        assert each.link_bytes["write"] - never.link_bytes["write"] == pytest.approx(more, rel=0.1)
        assert fourth.link_bytes["write"] - never.link_bytes["write"] == pytest.approx(
            more / 4, rel=0.1
        )
        assert fourth.step_s - never.step_s == pytest.approx((each.step_s - never.step_s) / 4)
        dearer += each.step_s > 1.1 * never.step_s
    assert dearer >= 3
