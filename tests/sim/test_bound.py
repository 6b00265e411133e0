"""The schedule against the bound: on a machine of set rates, whichever lane is the slowest.

The machine is so slow that what else runs here hardly matters; `python -m benchmarks bound` takes
longer and says more.
"""

from __future__ import annotations

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
