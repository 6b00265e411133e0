"""Models and options at random, with random delays: no race, and the bits of the CPU."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import overspill
from overspill.blueprints import make_blueprint
from overspill.planning.plan import Preference
from tests.parity.test_properties import drawn_model, drawn_options, fitting, trained


def check(native: ModuleType, seed: int, steps: int, folder: Path) -> None:
    cpu, rng = torch.device("cpu"), random.Random(seed)
    with cpu:
        plain = {"device": "cpu", "host_memory": "1GiB", "update": "step"}
        expected = trained(drawn_model(seed), plain, steps, cpu)
        model = drawn_model(seed)
    options = fitting(model, rng, drawn_options(rng, folder))
    prefer = rng.choice([None, Preference(visiting=rng.choice([0.3, 1.0]))])
    native.set_delays(seed, rng.choice([0, 5, 30]), 1000)
    try:
        with mock.patch(
            "overspill.wrapping.make_blueprint", partial(make_blueprint, prefer=prefer)
        ):
            got = trained(model, options, steps)
    except overspill.BudgetError:  # the preference needs more than what fits without it
        got = trained(model, options, steps)
    for name, value in expected.items():
        assert torch.equal(value, got[name].cpu()), f"{name} differs under {options}"
    races = native.take_races()
    assert not races, f"{options}: {len(races)} races, the first: {races[0]}"


@pytest.mark.parametrize("seed", range(12))
def test_options_do_not_change_a_bit(native: ModuleType, seed: int, tmp_path: Path) -> None:
    check(native, seed, 6, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_a_thousand_models_and_options(native: ModuleType, tmp_path: Path) -> None:
    for seed in range(1000, 2000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            check(native, seed, 6, folder)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
