"""Whether a model fits, drawn at random: what "fits" runs, and what "does not fit" needed more."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from overspill.facts.rates import Rates
from overspill.facts.tier import Tier
from overspill.planning.bounds import step_bound
from overspill.planning.coarse import coarsen
from overspill.planning.costs import Costs
from overspill.planning.partition import Partition
from overspill.planning.plan import Budgets, Needs
from overspill.planning.planner import make_layout
from overspill.planning.simulate import Simulation
from overspill.planning.steady import simulate
from overspill.schedule.invariants import validate
from overspill.schedule.units import align
from tests.random_parts import Field, random_parts, some_packed

CASES = 200
RATES = Rates(1e9, 1e9, 1e-5, 5e8, 4e8, 6e8, 1e8, 1e10, 1e11)


def draw(seed: int) -> tuple[Partition, Budgets, Needs]:
    rng = random.Random(seed)
    parts = random_parts(rng)
    update = rng.choice(["step", "backward", "backward", "next_forward"])
    accumulate = rng.choice([1, 1, 3])
    needs = Needs(
        lambda chunk: [Field("exp_avg", torch.float32)], accumulate, update,
        int(rng.random() < 0.5), rng.randint(0, 6),
    )  # fmt: skip
    device = None if rng.random() < 0.4 else rng.randint(1, 30) * 100_000
    nvme = None if rng.random() < 0.2 else rng.choice([10**6, 10**7, 10**9])
    if nvme is None:  # there is nowhere to be durable
        needs = replace(needs, commit_every=0)
    return parts, Budgets(device, rng.randint(1, 40) * 100_000, nvme), needs


def of_tier(budgets: Budgets, tier: Tier, nbytes: int) -> Budgets:
    name = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.NVME: "nvme"}[tier]
    return replace(budgets, **{name: nbytes})


def runs(parts: Partition, budgets: Budgets, needs: Needs) -> None:
    """Two steps of the very machine, with every invariant checked after every signal."""
    layout, disk, shortfalls = make_layout(parts, budgets, needs)
    assert not shortfalls
    if budgets.device is None:  # weights are unpacked to host memory
        assert layout.regions.counted_host_bytes + layout.regions.device_bytes <= budgets.host
    else:
        assert layout.regions.counted_host_bytes <= budgets.host
        assert layout.regions.device_bytes <= budgets.device
    assert disk <= (budgets.nvme or 0)
    run = Simulation(layout, Costs.from_flops(layout, RATES, 64))
    handle = run.machine.handle

    def checked(signal: object) -> object:
        out = handle(signal)  # type: ignore[arg-type]
        validate(run.machine)
        return out

    run.machine.handle = checked  # type: ignore[method-assign,assignment]
    for _ in range(2):
        run.step(needs.accumulate, needs.update)
    unpacked = layout.regions.device_bytes if budgets.device is None else 0
    assert run.peak_bytes[Tier.HOST] <= layout.regions.host_bytes + unpacked
    assert run.peak_bytes[Tier.DEVICE] <= layout.regions.device_bytes


def test_what_fits_runs_and_what_does_not_needed_more() -> None:
    fitted = short = 0
    for seed in range(CASES):
        parts, budgets, needs = draw(seed)
        try:
            _, _, shortfalls = make_layout(parts, budgets, needs)
            if not shortfalls:
                fitted += 1
                runs(parts, budgets, needs)
                continue
            short += 1
            for lacking in shortfalls:
                assert lacking.need_bytes > lacking.have_bytes
                budgets = of_tier(budgets, lacking.tier, lacking.need_bytes)
            rest = make_layout(parts, budgets, needs)[2]
            # With room for one tier's need, more may come to light in the next: never the same.
            assert not {s.tier for s in rest} & {s.tier for s in shortfalls}, rest
            for lacking in rest:
                budgets = of_tier(budgets, lacking.tier, lacking.need_bytes)
            runs(parts, budgets, needs)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert fitted > 40 and short > 40, (fitted, short)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_simulated_step_is_not_below_its_bound(seed: int) -> None:
    parts, budgets, needs = draw(seed)
    layout, _, shortfalls = make_layout(parts, replace(budgets, nvme=10**9), needs)
    if shortfalls:
        pytest.skip("does not fit")
    seen = simulate(
        layout, Costs.from_flops(layout, RATES, 64), micro_steps=needs.accumulate,
        update=needs.update,
    )  # fmt: skip
    bound = step_bound(
        layout, seen.link_bytes, RATES, tokens=64 * needs.accumulate,
        update=needs.update, micro_steps=needs.accumulate,
    )  # fmt: skip
    assert seen.stats.step_s >= bound.seconds * 0.9999, (seen.stats, bound)


def test_joined_subgroups_move_the_same_bytes() -> None:
    parts, budgets, needs = draw(3)
    layout = make_layout(parts, replace(budgets, host=10**7, nvme=10**9), needs)[0]
    coarse = coarsen(layout, most=2)
    count = [sum(len(group) for group in each.subgroups) for each in (layout, coarse)]
    assert count[1] < count[0]
    sums = [sum(s.nbytes for g in each.subgroups for s in g) for each in (layout, coarse)]
    assert sums[0] == sums[1]
    assert coarsen(layout, most=10**6) is layout


def test_host_copies_of_frozen_units_are_counted_once_for_all_ranks_that_share_them() -> None:
    """Ranks have them at the same places, before all else, and need less memory each."""
    shared = 0
    for seed in range(CASES):
        parts, budgets, needs = draw(seed)
        parts = some_packed(parts, random.Random(seed))
        frozen = [unit.index for unit in parts.units if not unit.trainable and not unit.packed]
        needs = replace(needs, in_place=frozenset(frozen[::2]), sharers=3)
        layout, _, shortfalls = make_layout(parts, budgets, needs)
        alone, _, alone_short = make_layout(parts, budgets, replace(needs, sharers=1))
        assert not alone.shared_places and not alone.regions.host_shared
        assert alone_short or not shortfalls  # who shares needs no more
        if shortfalls:
            continue
        runs(parts, budgets, needs)
        end = 0
        for unit, place in layout.shared_places.items():
            assert place.offset == end and place.nbytes == parts.units[unit].stored_bytes
            assert unit in layout.unchangeable and not layout.homes[unit].device_place
            end += align(place.nbytes, 4096)
        assert end <= layout.regions.host_shared < end + 65536
        for home in layout.homes:
            for place in (home.grad_place, *home.state_places):
                assert place is None or place.tier is Tier.DEVICE or place.offset >= end
        saved = layout.regions.host_bytes - layout.regions.counted_host_bytes
        assert saved == layout.regions.host_shared * 2 // 3
        shared += len(layout.shared_places)
    assert shared >= CASES // 10
