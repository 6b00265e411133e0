"""Without a device, compute shares the processors with updates and with moves to and from disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overspill.facts.rates import Rates
from overspill.planning.bounds import step_bound, trained_params
from overspill.planning.costs import Costs
from overspill.planning.partition import partition
from overspill.planning.plan import Budgets, Needs
from overspill.planning.planner import make_layout
from overspill.planning.steady import Simulated, simulate
from overspill.schedule.layout import Layout
from tests.random_parts import Field

MODES = ("step", "backward", "next_forward")


def layout_of(update: str, host: int, nvme: int | None, device: int | None = None) -> Layout:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    parts = partition(model, dict.fromkeys(model.parameters(), 0))
    needs = Needs(lambda chunk: [Field("exp_avg", torch.float32)], 1, update, 0, 3)
    layout, _, shortfalls = make_layout(parts, Budgets(device, host, nvme), needs)
    assert not shortfalls, shortfalls
    return layout


def run(layout: Layout, rates: Rates, update: str, compute_s: float) -> Simulated:
    count = len(layout.units)
    forward = [compute_s / 3 / count] * count
    costs = Costs(rates, forward, [2 * s for s in forward])
    return simulate(layout, costs, micro_steps=1, update=update)


@pytest.mark.parametrize("update", MODES)
def test_compute_and_updates_add_up(update: str) -> None:
    layout = layout_of(update, 10**8, None)
    rates = Rates(update_params_s=trained_params(layout) / 0.5)
    seen = run(layout, rates, update, 1.0)
    assert seen.stats.step_s == pytest.approx(1.5, rel=0.01)
    bound = step_bound(layout, seen.link_bytes, rates, update=update, compute_s=1.0)
    assert bound.seconds == pytest.approx(1.5) and bound.bottleneck in ("compute", "update")


def test_on_a_device_they_lie_under_each_other() -> None:
    layout = layout_of("backward", 10**8, None, 10**6)
    rates = Rates(update_params_s=trained_params(layout) / 0.5)
    assert run(layout, rates, "backward", 1.0).stats.step_s < 1.1


def test_moves_take_their_share_of_the_processors() -> None:
    layout = layout_of("backward", 2_500_000, 10**9)
    rates = Rates(disk_read_bytes_s=2e7, disk_write_bytes_s=2e7, disk_both_bytes_s=4e7)
    alone = run(layout, rates, "backward", 1.0)
    moved = sum(alone.link_bytes.values())
    assert moved > 10**6 and alone.stats.step_s == pytest.approx(1.0, rel=0.02)
    busy = run(layout, replace(rates, disk_cpu_bytes_s=moved / 0.3), "backward", 1.0)
    assert busy.stats.step_s == pytest.approx(1.3, rel=0.03), "0.3 s of a processor"
