"""What users and their editors see: public names, keywords with types, and what a plan says."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import overspill

OWN = {
    "wrap": ["model", "optimizer"],
    "plan": ["model", "optimizer", "machine", "ranks", "measure", "example"],
    "resume": ["model", "path", "optimizer"],
}
OF_THE_STORE = {"master", "moments", "checksum", "durable"}  # where resume is told nothing


@pytest.mark.parametrize("name", OWN)
def test_every_option_is_a_keyword_with_its_type_and_default(name: str) -> None:
    given = dict(inspect.signature(getattr(overspill, name)).parameters)
    for own in OWN[name]:
        del given[own]
    assert given.pop("unknown").kind is inspect.Parameter.VAR_KEYWORD
    options = {field.name: field for field in fields(overspill.OffloadConfig)}
    assert list(given) == list(options)
    for option, parameter in given.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation not in (inspect.Parameter.empty, "Any"), option
        expected = None if name == "resume" and option in OF_THE_STORE else options[option].default
        assert parameter.default == expected, option


def test_an_unknown_option_is_told_of_with_what_may_be_meant() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    wrong: dict[str, Any] = {"host_memroy": "1GiB"}
    for call in (overspill.wrap, overspill.plan):
        with pytest.raises(TypeError, match="did you mean 'host_memory'"):
            call(model, optimizer, **wrong)


def test_a_plan_has_nine_figures_and_the_detail() -> None:
    names = [field.name for field in fields(overspill.Plan)]
    assert len(names) == 10 and names[-1] == "detail"
    model = nn.Linear(4, 4)
    plan = overspill.plan(model, torch.optim.SGD(model.parameters()), device="cpu")
    assert plan.fits and plan.detail.layout is not None and plan.detail.update == "next_forward"


def test_public_names_are_what_they_say() -> None:
    assert all(hasattr(overspill, name) for name in overspill.__all__)
    for name in ("OffloadedOptimizer", "Machine", "MemoryStats", "Stats", "Rates", "Tier"):
        assert name in overspill.__all__
    model = nn.Linear(4, 4)
    with overspill.wrap(model, torch.optim.SGD(model.parameters()), device="cpu") as optimizer:
        assert isinstance(optimizer, overspill.OffloadedOptimizer)
        assert isinstance(optimizer.memory["host"], overspill.MemoryStats)
        with optimizer.accumulate(final=True):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
