"""``resident=``: modules whose weights stay on the device, whatever the plan would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.devices import CPU, SIM, plainly
from tests.models import TinyLM, adamw, batch

PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "700KiB", "host_memory": "64MiB"},
}
if CPU == "cpu":
    PLACES["disk"] = {"device": CPU, "host_memory": "1300KiB"}


def stay(plan: overspill.Plan) -> set[str]:
    return {name for name, home in plan.placement.items() if home.resident}


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_named_stays_and_nothing_else_changes(
    place: str, update: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, plain = TinyLM(), TinyLM()
    plain.load_state_dict(model.state_dict())
    options = {"nvme": tmp_path, "rates": overspill.Rates(), "update": update, **PLACES[place]}
    usual = stay(overspill.plan(model, adamw(model), **options))
    names = [name for name, _ in model.named_modules() if name.startswith("blocks.")]
    named = next(name for name in names if name.count(".") == 1 and name not in usual)
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(model, adamw(model), resident=[named], **options) as ours:
        assert named in stay(ours.plan)
        for number in range(3):
            losses = []
            for m, o in ((plain, theirs), (model, ours)):
                loss = m(*batch(number))
                loss.backward()
                o.step()
                o.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


def test_what_cannot_stay_is_told() -> None:
    model = TinyLM()
    with pytest.raises(ValueError, match="resident: the model has no module 'bloks'"):
        overspill.plan(model, adamw(model), device=CPU, resident=["bloks"])
    with pytest.raises(TypeError, match="resident must be a list"):
        overspill.plan(model, adamw(model), device=CPU, resident="blocks")
    plan = overspill.plan(
        model, adamw(model), device=SIM, device_memory="700KiB", host_memory="64MiB",
        rates=overspill.Rates(), resident=["blocks", "embed"],
    )  # fmt: skip
    assert not plan.fits and "fewer in resident=" in str(plan.shortfalls[0])
