"""QLoRA as people write it: ``from_pretrained`` with bitsandbytes, peft, and ``wrap``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import overspill
from overspill.facts.tier import Tier
from tests.devices import SIM, about_cpu, plainly
from tests.quantised import folders
from tests.quantised.folders import LLAMA, Folders
from tests.quantised.test_training import steps

pytestmark = about_cpu  # bitsandbytes has no kernels for the test device

TIGHT: dict[str, Any] = {"device": SIM, "device_memory": "320KiB", "host_memory": "64MiB"}
KINDS = {
    "4 bits": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "8 bits": BitsAndBytesConfig(load_in_8bit=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return folders.made(tmp_path_factory.mktemp("nf4"), LLAMA, "nf4")


def build(folder: Path, kind: str | None, *, checkpoints: bool, **lora: Any) -> Any:
    more = {} if kind is None else {"quantization_config": KINDS[kind]}
    base: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", **more
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpoints)
    torch.manual_seed(3)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], **lora}
    return get_peft_model(base, LoraConfig(init_lora_weights="gaussian", **options)).train()


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_losses_are_those_in_memory(
    pair: Folders, kind: str | None, checkpoints: bool, tmp_path: Path
) -> None:
    folder = pair.quantised if kind is None else pair.plain
    plain = build(folder, kind, checkpoints=checkpoints)
    expected = steps(plain, plainly(overspill.optim.AdamW, trained(plain), lr=1e-2), 0, 3)
    model = build(folder, kind, checkpoints=checkpoints)
    inner = torch.optim.AdamW(trained(model), lr=1e-2)
    with overspill.wrap(model, inner, **TIGHT) as optimizer:
        assert steps(model, optimizer, 0, 3) == expected
        assert optimizer.stats.copy_in.bytes > 0, "the base is streamed"
        device = optimizer.memory[Tier.DEVICE]
        assert device.peak_bytes <= device.budget_bytes
        model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("place", [{"device": "cpu", "host_memory": "64MiB"}, TIGHT])
def test_dora_over_four_bits(pair: Folders, place: dict[str, Any]) -> None:
    """peft dequantises the weight in forward, and assigns it to the layer again."""
    plain = build(pair.plain, "4 bits", checkpoints=False, use_dora=True)
    expected = steps(plain, plainly(overspill.optim.AdamW, trained(plain), lr=1e-2), 0, 3)
    model = build(pair.plain, "4 bits", checkpoints=False, use_dora=True)
    weight = model.get_parameter(
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    )
    inner = torch.optim.AdamW(trained(model), lr=1e-2)
    with overspill.wrap(model, inner, **place) as optimizer:
        assert steps(model, optimizer, 0, 3) == expected
        assert any(p is weight for p in model.parameters())
        overspill.unwrap(model)
    with torch.no_grad():
        batch = torch.arange(16).view(1, 16)
        assert torch.equal(model(input_ids=batch).logits, plain(input_ids=batch).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_afterwards_says_that_it_is_quantised(
    pair: Folders, kind: str, tmp_path: Path
) -> None:
    """Modules inside share the configuration of the model, which keeps ``quantization_config``."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        pair.plain, dtype=torch.bfloat16, device_map="cpu", quantization_config=KINDS[kind]
    )
    model.requires_grad_(False)
    batch = torch.arange(16).view(1, 16)
    with torch.no_grad():
        expected = model.train()(input_ids=batch).logits
    engine = overspill.wrap(model, **TIGHT)
    overspill.unwrap(model)
    engine.close()
    model.save_pretrained(tmp_path)
    again: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map="cpu"
    )
    with torch.no_grad():
        assert torch.equal(again.train()(input_ids=batch).logits, expected)


def test_a_model_with_quantised_layers_takes_no_files(pair: Folders) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        pair.quantised, dtype=torch.bfloat16, device_map="cpu"
    )
    with pytest.raises(ValueError, match="quantised by bitsandbytes when it was loaded"):
        overspill.wrap(model, weights=pair.quantised, **TIGHT)
    with overspill.empty_init():
        model = folders.empty(pair.quantised)
    ample = {**TIGHT, "device_memory": "1MiB"}
    with overspill.wrap(model, weights=pair.quantised, **ample):  # the remedy
        assert "quantization_config" not in model.config.to_dict()


def test_merged_weights_are_those_of_the_layers_in_memory(pair: Folders) -> None:
    plain = build(pair.quantised, None, checkpoints=False)
    model = build(pair.quantised, None, checkpoints=False)
    inner = torch.optim.AdamW(trained(model), lr=1e-2)
    with overspill.wrap(model, inner, **TIGHT):
        found = dict(overspill.named_weights(model))
    for name, p in plain.named_parameters():
        assert found[name].dtype == p.dtype
        assert torch.equal(found[name], p), name
