"""Every family trains as in plain torch: weights and losses bit for bit, in tight memory and in
ample memory, in every update mode, with checkpointing, and with text generated between steps."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import overspill
from tests.devices import CPU, DEVICE, NAME, SIM, about_cpu, about_sim, plainly
from tests.families.diffusion import COMPLEX, DIFFUSION
from tests.families.multimodal import MULTIMODAL
from tests.families.table import FAMILIES, Family

STEPS = 3
UPDATES = ("step", "next_forward", "backward")
MODES = ("plain", "checkpointing", "generating")
MEMORY = ("tight", "ample")
ALL = {**FAMILIES, **MULTIMODAL, **DIFFUSION}
# Of diffusers' models only these are for everyday runs.
DAILY = {
    *FAMILIES, *MULTIMODAL, "stable diffusion xl", "controlnet", "autoencoder", "flux",
    "stable diffusion 3", "wan",
}  # fmt: skip


def places(model: Any, beside: int = 0) -> dict[str, dict[str, Any]]:
    """Budgets of about a third of what the model needs, and of more than that."""
    weights = sum(p.numel() * 4 for p in model.parameters())
    largest = max(sum(p.numel() * 4 for p in m.parameters(recurse=False)) for m in model.modules())
    tight = weights // 3 + 5 * largest + (64 << 10) + beside
    found = {
        "tight device": {"device": SIM, "device_memory": tight, "host_memory": 6 * weights},
        "ample device": {"device": SIM, "device_memory": "64MiB", "host_memory": "64MiB"},
    }
    if CPU == "cpu":
        tight = weights + 12 * largest + (96 << 10) + 3 * beside
        found["tight cpu"] = {"device": CPU, "host_memory": tight}
        found["ample cpu"] = {"device": CPU, "host_memory": "64MiB"}
    return found


def moved(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: moved(value) for key, value in batch.items()}
    return batch.to(DEVICE) if isinstance(batch, torch.Tensor) else batch


def drop_kept_graphs(model: Any) -> None:
    """Drop what layers of RecurrentGemma keep of their last state, and of its graph."""
    for module in model.modules():
        if "recurrent_states" in vars(module):
            module.recurrent_states = None


def train(family: Family, model: Any, optimizer: Any, mode: str) -> list[float]:
    found = []
    for step in range(STEPS):
        model.train()
        torch.manual_seed(step)  # of dropout
        np.random.seed(step)  # of what models of speech mask
        loss = family.loss(model, moved(family.batch(step)))
        loss.backward()
        drop_kept_graphs(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if mode == "generating":
            model.eval()
            inputs = moved(family.batch(100 + step))
            inputs.pop("labels")
            with torch.no_grad():
                made = model.generate(**inputs, max_new_tokens=3, do_sample=False)
            found += made.flatten().tolist()
    return found


def check(family: Family, place: str, update: str, mode: str, folder: Path) -> None:
    plain, model = family.build(), family.build()
    if mode == "checkpointing":
        for each in (plain, model):
            family.checkpoint(each)
    lr = 1e-2
    theirs = plainly(
        overspill.optim.AdamW, [p for p in plain.parameters() if p.requires_grad], lr=lr
    )
    plain.to(DEVICE)
    expected = train(family, plain, theirs, mode)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    with overspill.wrap(
        model, inner, nvme=folder, durable=False, update=update, rates=overspill.Rates(),
        **places(model, family.beside)[place],
    ) as ours:  # fmt: skip
        assert train(family, model, ours, mode) == expected
        weights = plain.state_dict()
        assert all(torch.equal(v, weights[n]) for n, v in model.state_dict().items())


def cases() -> list[Any]:
    """All of them; those that are not drawn for everyday runs are for the soak."""
    chance = random.Random(0)
    found = []
    for name, family in ALL.items():
        mine = [
            (name, f"{memory} {device}", update, mode)
            for memory in MEMORY
            for device in ("device", "cpu")
            for update in UPDATES
            for mode in MODES
            if (mode != "generating" or family.generates)
            and (mode != "checkpointing" or family.recomputes)
            and (device == "device" or CPU == "cpu")
        ]
        daily = chance.choice([case for case in mine if case[1].startswith("tight")])
        found += [
            pytest.param(
                *case,
                marks=() if case == daily and name in DAILY else pytest.mark.soak,
                id="-".join(case),
            )
            for case in mine
        ]
    return found


@pytest.mark.parametrize(("name", "place", "update", "mode"), cases())
def test_a_family(name: str, place: str, update: str, mode: str, tmp_path: Path) -> None:
    pytest.importorskip(ALL[name].library)
    if NAME == "testdev" and hasattr(ALL[name].build().config, "num_experts_per_tok"):
        pytest.skip("experts are counted by histc, which the test device has not")
    if NAME == "testdev" and name in COMPLEX:
        pytest.skip("the test device has no backward of complex numbers")
    check(ALL[name], place, update, mode, tmp_path)


def test_there_are_enough() -> None:
    assert len(FAMILIES) >= 70 and len(MULTIMODAL) >= 15 and len(DIFFUSION) >= 20


@about_cpu
@pytest.mark.parametrize("update", UPDATES)
def test_weights_read_amid_a_unit_that_fills_all_room(update: str, tmp_path: Path) -> None:
    """DeBERTa's layers read a table that belongs to none of them, where one layer just fits."""
    check(FAMILIES["deberta"]._replace(beside=0), "tight cpu", update, "plain", tmp_path)


@about_cpu
@pytest.mark.parametrize("name", ["flux", "stable diffusion"])
def test_a_wrapped_model_of_diffusers_is_saved(name: str, tmp_path: Path) -> None:
    """``save_pretrained`` writes the trained weights, wherever they are."""
    pytest.importorskip("diffusers")
    model = DIFFUSION[name].build()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, inner, nvme=tmp_path, durable=False, rates=overspill.Rates(),
                        **places(model, 64 << 10)["tight device"]) as optimizer:  # fmt: skip
        DIFFUSION[name].loss(model, DIFFUSION[name].batch(0)).backward()
        optimizer.step()
        model.save_pretrained(tmp_path / "saved")
        expected = {key: value.clone() for key, value in model.state_dict().items()}
    again = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in expected.items())
    fresh = DIFFUSION[name].build().state_dict()
    assert any(not torch.equal(value, fresh[key]) for key, value in expected.items())


@about_sim
def test_a_plan_says_how_many_blocks_it_streams() -> None:
    """With adapters a block is two units, which count once."""
    pytest.importorskip("diffusers")
    from peft import LoraConfig

    model = DIFFUSION["flux"].build()  # 4 blocks and 5 layers around them
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rates = overspill.Rates(h2d_bytes_s=1e9, d2h_bytes_s=1e9, device_flops_s=1e9)
    found = []
    for room in ("200KiB", "300KiB", "4MiB"):
        plan = overspill.plan(model, inner, device=SIM, device_memory=room, rates=rates)
        said = re.search(r"streams (\d+) of (\d+) units \((\d+)% of the weights\), ", str(plan))
        found.append(None if said is None else tuple(map(int, said.groups())))
        assert plan.fits and ("streams no units, " in str(plan)) == (said is None)
        assert ("without compute" in str(plan)) == (said is not None)
    tight, loose, none = found
    assert tight is not None and loose is not None and none is None
    assert 0 < loose[0] < tight[0] <= 9 == loose[1] == tight[1]
    assert 0 < loose[2] < tight[2] <= 100
    given = {"device": SIM, "device_memory": "4MiB", "tokens": 22}
    plan = overspill.plan(model, inner, rates=rates, **given)
    assert "bound" in str(plan) and "without compute" not in str(plan)
    plan = overspill.plan(model, inner, rates=overspill.Rates(update_params_s=1e9), **given)
    assert "without compute" in str(plan), "tokens, but nobody knows the device's rate"
