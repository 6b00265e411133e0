"""Which units are computed again: as many as the links cannot carry, and no more than the batch
needs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.activations import known_code
from tests.devices import CPU, SIM, about_sim, normal
from tests.models import adamw, weights
from tests.parity.chains import (
    CALLS,
    PURE,
    RATES,
    TIGHT,
    Block,
    Checkpointed,
    chain,
    known_as_the_libraries_are,
    step,
)
from tests.patience import on_slower_machines

WIDE = 10**4  # of a link on which everything fits in no time


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    known_as_the_libraries_are(monkeypatch, __name__)


@about_sim
def test_auto_computes_again_what_the_link_cannot_carry(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "overspill")
    model = chain()
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        step(model, optimizer, 0)
        assert len(CALLS) == 8
        CALLS.clear()
        step(model, optimizer, 1)
        assert len(CALLS) > 8
        assert "computed again" in caplog.text
        CALLS.clear()
        step(model, optimizer, 2, batch=1)  # all of it may stay
        assert len(CALLS) == 8


@about_sim
def test_auto_leaves_modules_alone_of_which_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = chain()
    handle = model.blocks[2].register_forward_pre_hook(lambda _m, args: args)
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        chosen = optimizer._engine._loop.tuner.recompute.units
        assert chosen
        assert 2 not in chosen, "a hook of the user's runs around it"
    handle.remove()
    monkeypatch.setattr(known_code, "_pure", PURE)
    monkeypatch.setattr(known_code, "LIBRARIES", ("torch.nn.",))  # what it appends to is seen
    model = chain()
    CALLS.clear()
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed)
    assert len(CALLS) == 24


@pytest.mark.alone
@pytest.mark.skipif(SIM != "sim", reason="compute takes a known time on the simulated device")
def test_what_is_computed_again_counts_once_in_what_a_step_costs() -> None:
    """As long as the model says: what is measured has the forwards of backward within it."""

    def counts_once(slowness: float) -> None:
        model, flops_s, link_s = chain(), 3e8 / slowness, 6e5 / slowness
        slow = replace(RATES, device_flops_s=flops_s, h2d_bytes_s=link_s, d2h_bytes_s=link_s)
        with overspill.wrap(model, adamw(model), **TIGHT, rates=slow) as optimizer:
            engine = optimizer._engine
            for seed in range(6):
                step(model, optimizer, seed)
                CALLS.clear()
            units = engine.runtime.layout.units
            modelled_s = sum(u.flops + u.backward_flops for u in units) * 16 * 8 / flops_s
            chosen, costs = engine._loop.tuner.adapted()
            assert len(chosen.units) > 5
            assert costs.compute_s == pytest.approx(modelled_s, rel=0.1)

    on_slower_machines(counts_once, factors=(1, 4, 4, 8))


@about_sim
def test_auto_moves_what_the_link_carries(tmp_path: Path) -> None:
    model = chain()
    fast = overspill.Rates(
        h2d_bytes_s=RATES.h2d_bytes_s * WIDE, d2h_bytes_s=RATES.d2h_bytes_s * WIDE,
        dram_bytes_s=20e9, update_params_s=1e9, device_flops_s=2e9,
        disk_read_bytes_s=1e9, disk_write_bytes_s=1e9,
    )  # fmt: skip
    with overspill.wrap(model, adamw(model), **TIGHT, rates=fast) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed)
        assert len(CALLS) == 24


@about_sim
def test_a_larger_batch_is_another_load() -> None:
    model = chain()
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        counts = []
        for seed, batch in enumerate([1, 1, 16, 16, 16, 24, 24, 1]):
            step(model, optimizer, seed, batch)
            counts.append(len(CALLS))
            CALLS.clear()
    assert counts[:3] == [8, 8, 8]
    assert counts[4] > 8  # once it has been seen
    assert counts[6] > 8
    assert counts[7] == 8


@about_sim
def test_nothing_is_decided_anew_within_a_step() -> None:
    """What a checkpoint of the user's computes again saves what it saved before, also where a
    larger batch came in between."""
    model = Checkpointed([Block() for _ in range(8)])
    model.asked = False
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        model.asked = True
        line = 16 * optimizer._engine._loop.tuner.recompute.keeps_below
        small = int(line) + 1  # computed again, as it would not be beside the larger one
        (model(normal(1, small, 8, 32)) + model(normal(2, 32, 8, 32))).backward()
        optimizer.step()


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_bits_are_those_of_keep_while_it_adapts(place: str, tmp_path: Path) -> None:
    found = []
    for policy in ("keep", "auto"):
        model = chain()
        options: dict[str, Any] = {"device": CPU, "host_memory": "2MiB", "nvme": tmp_path}
        if place == "device":
            options = {**TIGHT, "device_memory": "700KiB"}
        with overspill.wrap(
            model, adamw(model), **options, rates=RATES, durable=False, activations=policy
        ) as optimizer:
            sizes = [4, 16, 16, 2, 24, 24, 1, 16]
            losses = [step(model, optimizer, i, size) for i, size in enumerate(sizes)]
            found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


@about_sim
@pytest.mark.parametrize("told", [{"tokens": 256}, {"activations": "recompute"}], ids=str)
def test_known_units_are_computed_again_from_the_first_step_on(
    told: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the load is known, not even the first step is over the budgets; and so it stays."""
    model, alone = chain(), chain()
    alone_optimizer = adamw(alone)
    options = {"device": "sim", "device_memory": "700KiB", "host_memory": "2MiB", "rates": RATES}
    with overspill.wrap(model, adamw(model), **options, **told) as optimizer:
        again = optimizer.plan.detail.layout.saved.recompute
        assert again
        for number in range(4):
            CALLS.clear()
            loss = step(model, optimizer, number, batch=32)
            computed = len(CALLS)
            assert computed > 8, number
            plain = step(alone, alone_optimizer, number, batch=32)
            assert loss == pytest.approx(plain, rel=1e-5)
        held = optimizer.memory["device"]
        assert held.peak_bytes <= held.budget_bytes
    assert not [r for r in caplog.records if "over the budget" in r.getMessage()]


def test_a_plan_that_knows_the_load_chooses_too() -> None:
    model = chain().cpu()
    options = {"device": "sim", "device_memory": "700KiB", "host_memory": "64MiB", "rates": RATES}
    made = overspill.plan(model, adamw(model), **options, tokens=256)
    assert made.detail.layout is not None
    assert made.detail.layout.saved.recompute
    assert "computed again" in str(made)
    few = overspill.plan(model, adamw(model), **options, tokens=8)
    assert few.detail.layout is not None
    assert not few.detail.layout.saved.recompute
