"""The schedule against the bound: on a machine of set rates, whichever lane is the slowest.

The machine is so slow that what else runs here hardly matters; `python -m benchmarks bound` takes
longer and says more.
"""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from benchmarks.model import Shape
from benchmarks.sim_machine import SimMachine, measure, meta_model, slowest
from overspill.planning.bounds import move_seconds, step_bound, step_flops, trained_params
from tests.patience import on_slower_machines

SHALLOW = Shape(layers=16, width=128, heads=4, vocabulary=256, batch=1, tokens=16)


@pytest.mark.parametrize("lane", ["compute", "update"])
def test_backward_mode_is_near_its_bound(lane: str) -> None:
    def near(slowness: float) -> None:
        seen = measure(SimMachine(SHALLOW, "backward", slowest(lane, 0.8 * slowness)), steps=2)
        assert 0.98 < seen.ratio < 1.35, seen
        if lane == "compute":
            assert seen.covered > 0.8, seen

    on_slower_machines(near)


def test_step_mode_waits_for_all_compute_first() -> None:
    def waits(slowness: float) -> None:
        seen = measure(SimMachine(SHALLOW, "step", slowest("update", 0.6 * slowness)), steps=2)
        assert seen.bound_s >= 0.9 * slowness, "0.3 s of compute come before 0.6 s of updates"
        assert 0.98 < seen.ratio < 1.5, seen

    on_slower_machines(waits)


def test_what_waits_for_the_last_gradients_adds_to_the_bound() -> None:
    model, optimizer = meta_model(SHALLOW), torch.optim.AdamW
    rates = overspill.Rates(
        h2d_bytes_s=1e12, d2h_bytes_s=1e12, update_params_s=1e6, device_flops_s=1e8
    )
    plan = overspill.plan(
        model,
        optimizer(model.parameters()),
        device="sim",
        rates=rates,
        device_memory="2MiB",
    )
    layout = plan.detail.layout
    assert layout is not None
    update_s = trained_params(layout) / 1e6
    compute_s = step_flops(layout.units, 16) / 1e8

    def bound(update: str, micro_steps: int = 1) -> float:
        return step_bound(
            layout, plan.link_bytes, rates, update=update, micro_steps=micro_steps, tokens=16
        ).seconds

    assert bound("next_forward") == pytest.approx(compute_s * 2 / 3 + update_s, rel=1e-3)
    assert bound("next_forward", 2) == pytest.approx(compute_s / 3 + update_s, rel=1e-3)
    # Behind backward, but for gradients that there is room to keep until the next forward.
    first, total = layout.grad_bytes[0], sum(layout.grad_bytes)
    due = 1 - (layout.regions.host_grads - first) / total
    assert 0 < due < 1
    assert bound("backward") == pytest.approx(compute_s / 3 + update_s * due)
    assert bound("backward", 2) == pytest.approx(max(compute_s, update_s), rel=1e-3)
    assert bound("step") == pytest.approx(compute_s + update_s, rel=1e-3)
    none = step_bound(layout, {}, overspill.Rates(), update="step")
    assert none.seconds == 0.0 and none.bottleneck is None


def test_reads_and_writes_share_a_disk() -> None:
    """At once the two get 1 and 1.5 GB/s; reads, the longer, end alone."""
    rates = overspill.Rates(
        disk_read_bytes_s=2e9, disk_write_bytes_s=3e9, disk_both_bytes_s=2.5e9, h2d_bytes_s=4e9
    )
    seconds = move_seconds({"read": 8_000_000_000, "write": 6_000_000_000, "copy_in": 10**9}, rates)
    assert seconds == pytest.approx({"read": 4 + 2, "write": 2, "copy_in": 0.25})
    assert move_seconds({"read": 8_000_000_000}, rates) == {"read": 4.0}
    assert move_seconds({"read": 8_000_000_000}, None) == {}


def drawn(draw: random.Random, between: tuple[float, float]) -> float:
    """A number with an even logarithm."""
    return math.exp(draw.uniform(*map(math.log, between)))


def drawn_machine(draw: random.Random) -> tuple[overspill.Rates, dict[str, Any]]:
    """Rates, and the options of a machine that has them: with a device or without one."""
    read, write = drawn(draw, (5e8, 8e9)), drawn(draw, (3e8, 6e9))
    disks_and_processors = {
        "disk_read_bytes_s": read,
        "disk_write_bytes_s": write,
        "disk_both_bytes_s": drawn(draw, (max(read, write), read + write)),
        "disk_cpu_bytes_s": drawn(draw, (4e9, 4e10)),
        "update_params_s": drawn(draw, (1e8, 5e9)),
        "dram_bytes_s": drawn(draw, (1e10, 2e11)),
        "device_flops_s": drawn(draw, (1e11, 3e12)),
    }
    host = {"host_memory": int(drawn(draw, (48e6, 4e8)))}
    if draw.random() < 0.4:
        return overspill.Rates(**disks_and_processors), {"device": "cpu", **host}
    link = {
        "h2d_bytes_s": drawn(draw, (4e9, 5e10)),
        "d2h_bytes_s": drawn(draw, (4e9, 5e10)),
        "link_latency_s": 1e-5,
        "device_update_params_s": drawn(draw, (5e8, 2e10)),
    }
    device = {"device": "sim", "device_memory": int(drawn(draw, (32e6, 1.2e8)))}
    return overspill.Rates(**disks_and_processors, **link), {**device, **host}


def test_drawn_machines_are_planned_near_their_bound(tmp_path: Path) -> None:
    """No schedule is below the bound, and that of the engine is seldom far above it."""
    shape = Shape(layers=12, width=256, heads=4, vocabulary=2048, batch=2, tokens=256)
    draw, ratios = random.Random(0), []
    for number in range(20):
        rates, options = drawn_machine(draw)
        model = meta_model(shape).to(torch.bfloat16)
        update = ("next_forward", "next_forward", "step", "backward")[number % 4]
        plan = overspill.plan(
            model, torch.optim.AdamW(model.parameters()), rates=rates, nvme=tmp_path, durable=False,
            tokens=shape.tokens_per_step, update=update, **options,
        )  # fmt: skip
        assert plan.fits and plan.step_s and plan.bound_s, (number, rates, options)
        ratios.append(plan.step_s / plan.bound_s)
    assert min(ratios) > 0.999, ratios
    assert statistics.median(ratios) < 1.05 and max(ratios) < 1.25, ratios
    assert sum(ratio > 1.1 for ratio in ratios) <= 5, ratios  # twelve units fill no pipeline
