"""Units that live on the device as a whole, and are updated there, beside others that stream in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import overspill
from overspill.config import Tier
from overspill.decide import decide
from overspill.schedule.bounds import device_update_share
from overspill.schedule.choose import choose_plan
from overspill.schedule.plan import Budgets, Preference
from overspill.schedule.planner import make_layout
from tests.models import TinyLM, adamw, train, weights
from tests.sim.test_choice import RATES, draw


def run(share: float, update: str, options: dict[str, Any]) -> tuple[float, Any, Any]:
    torch.manual_seed(0)
    model = TinyLM(depth=16)
    prefer = Preference(device=share)
    with (
        mock.patch("overspill.wrapping.decide", partial(decide, prefer=prefer)),
        overspill.wrap(model, adamw(model), device="sim", update=update, **options) as optimizer,
    ):
        plan = optimizer.plan
        assert plan.tier_bytes[Tier.DEVICE] <= plan.budgets.device
        losses = train(model, optimizer, 4)
        return plan.device_update_share, losses, weights(model)


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("nvme", [False, True])
def test_the_same_bits_whatever_the_share(update: str, nvme: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device_memory": "2300KiB", "host_memory": "64MiB"}
    if nvme:
        options |= {"nvme": tmp_path, "durable": False, "host_memory": "4MiB"}
    seen = [run(share, update, options) for share in (0.0, 0.5, 1.0)]
    shares = [share for share, _, _ in seen]
    assert shares[0] == 0 < shares[1] < shares[2] < 1, shares
    for _, losses, values in seen[1:]:
        assert losses == seen[0][1]
        assert values.keys() == seen[0][2].keys()
        for name, value in values.items():
            assert torch.equal(value, seen[0][2][name]), name


def test_the_plan_updates_there_where_that_pays() -> None:
    """Where the CPU is slow and the device fast, units go there; where the link is the slower one,
    weights do; and the simulated step is the shorter one."""
    for seed in range(0, 6, 2):
        parts, _, needs = draw(seed)
        budgets = Budgets(int(0.95 * parts.weight_bytes), 10**9, None)
        needs = replace(needs, update="next_forward")
        slow = replace(RATES, update_params_s=2e5, device_update_params_s=2e7)
        chosen = choose_plan(parts, budgets, needs, None, slow)
        assert chosen.needs.prefer.device > 0
        share = device_update_share(chosen.layout)
        plain = choose_plan(parts, budgets, needs, None, slow, prefer=Preference())
        assert chosen.step_s is not None and plain.step_s is not None
        assert share > 0.05 and chosen.step_s < (1 - share / 2) * plain.step_s
        link = replace(RATES, h2d_bytes_s=1e6, d2h_bytes_s=1e9, update_params_s=1e9)
        assert choose_plan(parts, budgets, needs, None, link).needs.prefer.device < 1


def test_commits_and_updates_in_backward_stay_on_the_host() -> None:
    """Commits are written from host memory: the share is not tried there."""
    parts, _, needs = draw(0)
    budgets = Budgets(int(0.95 * parts.weight_bytes), 10**9, 10**9)
    for ruled_out in (replace(needs, durable=True), replace(needs, update="backward")):
        wished = replace(ruled_out, prefer=Preference(device=1.0))
        layout, _, shortfalls = make_layout(parts, budgets, wished)
        assert not shortfalls and device_update_share(layout) == 0
        assert layout == make_layout(parts, budgets, ruled_out)[0], "the room is not lost"
