"""Compute and activations that plans estimate from shapes, beside what torch keeps and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from overspill.planning.products import (
    activation_bytes,
    backward_flops,
    forward_flops,
    set_sequence,
)
from overspill.planning.unit_discovery import FoundUnit
from overspill.train.choices import model_for

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
    "num_key_value_heads": 8, "use_cache": False,
}  # fmt: skip
TOKENS = 128


def llama(layers: int, adapters: torch.dtype | None) -> Any:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, **SHAPE)
    ).bfloat16()
    if adapters is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = p.data.to(adapters)
    return model


def kept_by(model: Any) -> int:
    """Bytes that autograd keeps of a forward, besides parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), t  # held, so that no address is reused
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long)).logits.sum()
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("adapters", [None, torch.bfloat16, torch.float32], ids=str)
def test_activations_are_about_what_torch_keeps(adapters: torch.dtype | None) -> None:
    few, more = llama(1, adapters), llama(3, adapters)
    real = (kept_by(more) - kept_by(few)) / 2 / TOKENS
    layer = next(m for n, m in few.named_modules() if n.endswith("layers.0"))
    planned = activation_bytes(FoundUnit("layer", layer, False), None)
    assert 0.8 * real < planned < 1.2 * real


@pytest.mark.parametrize("lora_rank", [None, 8])
def test_attention_is_counted_for_a_known_sequence(lora_rank: int | None) -> None:
    plain, model = model_for("llama-1b", lora_rank), model_for("llama-1b", lora_rank, None, 8192)
    layers = [m.get_submodule("model.layers.0") for m in (plain, model)]
    found = [FoundUnit("layer", layer, False) for layer in layers]
    width = layers[0].get_submodule("self_attn.o_proj").in_features
    # Scores and their product with the values, for half of the sequence.
    scores = 2 * (2 * width * 8192 / 2)
    assert forward_flops(found[1]) - forward_flops(found[0]) == scores
    trained = set(model.parameters()) | set(plain.parameters())
    backward = [backward_flops(each, trained, flows=True) for each in found]
    assert backward[1] - backward[0] == 2.5 * scores
    no_gradient = [backward_flops(each, set(), flows=False) for each in found]
    assert no_gradient == [0, 0]


def test_attention_of_transformers() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    )
    layer = FoundUnit("layer", model.transformer.h[0], False)
    before = forward_flops(layer)
    set_sequence(model, 100)
    assert forward_flops(layer) - before == 2 * 32 * 100
    head = FoundUnit("head", nn.Linear(4, 4), False)
    assert forward_flops(head) == 2 * 4 * 4
