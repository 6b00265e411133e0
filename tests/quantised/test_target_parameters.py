"""Adapters of peft over single parameters: stacks of experts, quantised in their files or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import overspill
from overspill.engine import engine_of
from overspill.integrations.experts import split_experts
from tests.devices import DEVICE, SIM, about_cpu, plainly
from tests.quantised import folders
from tests.quantised.folders import EXPERTS, GPT_OSS, Folders, empty
from tests.quantised.test_training import ids, steps

pytestmark = about_cpu  # experts count tokens by histograms, which the test device lacks
CONFIG: dict[str, Any] = {
    "r": 4, "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip
BASES = {"mxfp4": GPT_OSS, "fp8": EXPERTS}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu", "host_memory": "64MiB"},
    "device": {"device": SIM, "device_memory": "900KiB", "host_memory": "64MiB"},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    return {
        how: folders.made(tmp_path_factory.mktemp(how), config, how)
        for how, config in BASES.items()
    }


def adapted(base: Any) -> Any:
    return peft.get_peft_model(base, peft.LoraConfig(**CONFIG))


def begin(model: Any) -> None:
    """Give adapters values that change what the layers compute."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.02 * torch.randn(p.shape, generator=draw))


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(folder: Path) -> Any:
    model = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    begin(model)
    return model


@pytest.mark.parametrize("section", [None, "16KiB"])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", BASES)
def test_losses_and_files_are_those_of_the_plain_run(
    pairs: dict[str, Folders],
    how: str,
    place: str,
    checkpoints: bool,
    section: str | None,
    tmp_path: Path,
) -> None:
    expected = plain(pairs[how].plain)
    losses = steps(expected, plainly(overspill.optim.AdamW, trained(expected), lr=1e-2), 0, 3)
    expected.save_pretrained(tmp_path / "plain")
    with overspill.empty_init():
        model = adapted(empty(pairs[how].quantised))
        if section is not None:
            split_experts(model, section)
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        model.train()
    inner = torch.optim.AdamW(trained(model), lr=1e-2)
    weights = pairs[how].quantised
    with overspill.wrap(model, inner, weights=weights, **PLACES[place]) as optimizer:
        begin(model)
        assert steps(model, optimizer, 0, 3) == losses
        layout = optimizer.plan.detail.layout
        assert all(unit.packed for unit in layout.units if "proj" in unit.name)
        assert any(unit.packed and "proj" in unit.name for unit in layout.units) is bool(section)
        model.save_pretrained(tmp_path / "own")
    names = ("plain", "own")
    found = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in names]
    assert found[0] == found[1]


def test_it_computes_as_before_after_the_engine(pairs: dict[str, Folders]) -> None:
    """An adapter whose layer fails, or that is switched off, leaves the parameter in place."""
    expected = plain(pairs["fp8"].plain)
    batch = {"input_ids": ids(0)}
    with torch.no_grad():
        wanted = expected(**batch).logits
        with expected.disable_adapter():
            off = expected(**batch).logits
    model = plain(pairs["fp8"].plain)
    layer = next(m for n, m in model.named_modules() if n.endswith("experts.base_layer.base_layer"))
    before = layer.gate_up_proj
    with overspill.wrap(model, torch.optim.AdamW(trained(model)), **PLACES["device"]):
        with torch.no_grad():
            assert torch.equal(model(**batch).logits.cpu(), wanted)
            with model.disable_adapter():
                assert torch.equal(model(**batch).logits.cpu(), off)
            handle = layer.register_forward_pre_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                model(**batch)
            handle.remove()
            assert torch.equal(model(**batch).logits.cpu(), wanted)
        assert layer.gate_up_proj is before and engine_of(model) is not None
        overspill.unwrap(model)
    with torch.no_grad():
        assert torch.equal(model.to(DEVICE)(**batch).logits.cpu(), wanted)


def test_an_adapted_weight_stays_frozen(pairs: dict[str, Folders]) -> None:
    model = plain(pairs["fp8"].plain)
    inner = torch.optim.AdamW(trained(model), lr=1e-2)
    with overspill.wrap(model, inner, **PLACES["device"]) as optimizer:
        weight = next(p for n, p in model.named_parameters() if n.endswith("gate_up_proj"))
        weight.requires_grad_()
        with pytest.raises(overspill.OffloadError, match=r"freeze it \(requires_grad_\(False\)\)"):
            model(input_ids=ids(0))
        weight.requires_grad_(False)  # the remedy
        assert len(steps(model, optimizer, 0, 1)) == 1


def _fail(*_: Any) -> None:
    raise ZeroDivisionError
