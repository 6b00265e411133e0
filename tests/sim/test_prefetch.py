"""Prefetch moves what will be used, and each of it once: it never goes round and round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overspill
from benchmarks.model import Shape
from benchmarks.sim_machine import meta_model
from overspill.planning.costs import Costs
from overspill.planning.steady import simulate

RATES = overspill.Rates(
    h2d_bytes_s=1e8, d2h_bytes_s=1e8, disk_read_bytes_s=1e8, disk_write_bytes_s=1e8,
    update_params_s=2e7, device_flops_s=1e9,
)  # fmt: skip
SHAPE = Shape(layers=8, width=128, heads=4, vocabulary=256, batch=1, tokens=16)


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("depth", [0, 1, 3, 8, 20])
@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("host_memory", ["5MiB", "50MiB"])
def test_every_use_brings_its_weights_in_once(
    update: str, depth: int, slots: int, host_memory: str, tmp_path: Path
) -> None:
    model = meta_model(SHAPE)
    biggest = 2 * 12 * SHAPE.width**2  # bytes of a block's weights
    plan = overspill.plan(
        model, torch.optim.AdamW(model.parameters()), device="sim", rates=RATES, update=update,
        device_memory=(slots + 1) * biggest + 500_000, host_memory=host_memory,
        nvme=tmp_path, durable=False, prefetch_depth=depth,
    )  # fmt: skip
    layout = plan.detail.layout
    assert layout is not None
    uses = 2 * len(layout.units)  # in forward and in backward
    seen = simulate(layout, Costs.from_flops(layout, RATES, 16), micro_steps=1, update=update)
    weights = sum(unit.weight_bytes for unit in layout.units)
    assert seen.link_bytes["copy_in"] <= 3 * weights
    last = seen.trace.steps[-1]
    copies = [s for s in seen.trace.spans(last.started_ns) if s.lane == "copy_in"]
    assert len(copies) <= 1.5 * uses  # updates in backward may come otherwise than foreseen


def test_updates_come_in_the_order_of_the_next_forward(tmp_path: Path) -> None:
    """Of units that stay too, though nothing has to be brought for them."""
    model = meta_model(SHAPE)
    plan = overspill.plan(
        model, torch.optim.AdamW(model.parameters()), device="cpu", rates=RATES, durable=False,
        update="next_forward", host_memory="6MiB", nvme=tmp_path,
    )  # fmt: skip
    layout = plan.detail.layout
    assert layout is not None
    trained = [unit for unit in layout.units if unit.trainable]
    assert 2 < sum(layout.homes[unit.index].resident for unit in trained) < len(trained) - 2
    costs = Costs.from_flops(layout, RATES, 16)
    seen = simulate(layout, costs, micro_steps=1, update="next_forward")
    last = seen.trace.steps[-1]
    updates = [s.name for s in seen.trace.spans(last.started_ns) if s.lane == "update"]
    assert list(dict.fromkeys(updates)) == [unit.name for unit in trained]
