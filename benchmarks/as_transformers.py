"""The benchmark's Llama as transformers' own, over the same weights; with its activation offload.

Needs transformers 5.17 or later for the offload, and a device of torch's: it page-locks memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_IN_BLOCK = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
}  # fmt: skip
_OUTSIDE = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


class AsTransformers(nn.Module):
    """Loss of transformers' Llama, as ours takes tokens.  ``offload``: inputs of its layers, which
    are computed again in backward, wait in page-locked host memory."""

    def __init__(self, model: Any, device: torch.device, *, offload: bool) -> None:
        """``model``: a ``benchmarks.model.Llama`` with memory; its tensors are shared."""
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        width, first = model.head.in_features, model.blocks[0]
        config = LlamaConfig(
            vocab_size=model.head.out_features, hidden_size=width,
            intermediate_size=first.gate.out_features, num_hidden_layers=len(model.blocks),
            num_attention_heads=width // model.size,
            num_key_value_heads=first.k.out_features // model.size,
            max_position_embeddings=1 << 17, rms_norm_eps=1e-5, tie_word_embeddings=False,
            use_cache=False, attn_implementation="sdpa", pad_token_id=None,
        )  # fmt: skip
        with torch.device("meta"):
            made = LlamaForCausalLM(config)
        made.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # of no state dict
        weights = {_name(key): value for key, value in model.state_dict(keep_vars=True).items()}
        made.load_state_dict(weights, strict=True, assign=True)
        enable = getattr(made, "activation_checkpointing_enable", None)
        enable = enable or made.gradient_checkpointing_enable  # its name before 5.23
        enable(offload=offload)
        self.made = made.train()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, tokens + 1), int64."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        loss: torch.Tensor = self.made(input_ids=inputs, labels=targets, shift_labels=targets).loss
        return loss


def _name(key: str) -> str:
    parts = key.split(".")
    if parts[0] == "blocks":
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_OUTSIDE[parts[0]]}.{parts[1]}"
