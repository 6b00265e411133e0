"""The table of what models need is what plans say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fits import (
    CARD,
    HEAD,
    MACHINES,
    MARKS,
    MODELS,
    OPTIONS,
    PAGE,
    ROOT,
    TOKENS,
    machines,
    row,
    ways,
)
from overspill.facts.tier import Tier
from overspill.train.choices import least_budget, model_for
from overspill.train.gains import planner


def cells_of_the_page() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n") if line
    ]


@pytest.mark.parametrize("at", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (0, 5))])
def test_the_page_has_what_plans_say(at: int, tmp_path: Path) -> None:
    head, _, *found = cells_of_the_page()
    assert tuple(head) == HEAD
    ways_of = {model: list(ways(model, tmp_path)) for model in MODELS}
    assert [(model, what) for model, what, *_ in found] == [
        (model, recipe.name) for model in MODELS for recipe in ways_of[model]
    ]
    line = row("llama-1b", ways_of["llama-1b"][at])
    assert found[at] == [cell.strip() for cell in line.strip("|").split("|")]


def test_machines_are_linked_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in MACHINES:
        assert f"examples/machines/{name}.toml)" in page
        assert (ROOT / f"examples/machines/{name}.toml").is_file()


def test_a_tier_that_is_not_short_alone_has_no_least_budget() -> None:
    """Activations that are to stay on a card that is too small: no host memory helps."""
    desktop, *_ = machines()
    make = planner(model_for("llama-1b", None), {**OPTIONS, "activations": "keep"})
    assert least_budget(make, desktop, 10**6, Tier.HOST, CARD) is None
    least = least_budget(make, desktop, TOKENS, Tier.DEVICE, {"host_memory": "64GiB"})
    assert least is not None and least.fits and least.detail.budgets is not None
    card = least.detail.budgets.device
    assert card is not None
    less = {"host_memory": "64GiB", "device_memory": int(0.9 * card), "every_update": False}
    assert not make(desktop, TOKENS, less).fits
