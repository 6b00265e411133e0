"""Model families of transformers, tiny, built from their configs: how to build one, and a batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import transformers as hf

VOCABULARY, WIDTH = 128, 32
Batch = dict[str, torch.Tensor]


class Family(NamedTuple):
    """``generates``: it writes text token by token; ``recomputes``: it knows checkpointing;
    ``beside``: bytes of tight memory more, for what a layer reads of another while it is computed
    once more."""

    model: str
    config: str
    given: dict[str, Any]
    batch: Callable[[int], Batch]
    generates: bool = False
    recomputes: bool = True
    beside: int = 0
    library: str = "transformers"

    def build(self) -> Any:
        torch.manual_seed(0)
        if self.library == "diffusers":
            return getattr(importlib.import_module("diffusers"), self.model)(**self.given)
        return getattr(hf, self.model)(getattr(hf, self.config)(**self.given))

    def checkpoint(self, model: Any) -> None:
        """Let it compute activations again in backward."""
        if self.library == "diffusers":
            model.enable_gradient_checkpointing()
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        if self.library != "diffusers":
            again = batch.pop("again", None)  # other tokens with which the model runs once more
            loss = cast(torch.Tensor, model(**batch).loss)
            if again is None:
                return loss
            return loss + cast(torch.Tensor, model(**{**batch, "input_ids": again}).loss)
        target = batch.pop("target")
        if "x" in batch:  # a list of latents and of captions, of different sizes
            batch = {**batch, "x": [batch["x"]], "cap_feats": [batch["cap_feats"]]}  # type: ignore[dict-item]
        first, *others = tensors(model(**batch, return_dict=False))
        loss = torch.nn.functional.mse_loss(first, target)
        return sum((each.square().mean() for each in others), start=loss)


def tensors(made: Any) -> list[torch.Tensor]:
    """Return the tensors in what a model returns."""
    if isinstance(made, torch.Tensor):
        return [made]
    return [tensor for each in made for tensor in tensors(each)]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def tokens(seed: int, rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=drawn(seed), device="cpu")


def causal(seed: int) -> Batch:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids}


def to_sequence(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed + 1000, length=8)}


def to_class(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": torch.tensor([0, 1], device="cpu")}


def picture(seed: int) -> Batch:
    pixels = torch.randn(2, 3, 32, 32, generator=drawn(seed), device="cpu")
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1], device="cpu")}


def pair(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "pixel_values": picture(seed)["pixel_values"],
            "return_loss": True}  # type: ignore[dict-item]  # fmt: skip


def speech(seed: int) -> Batch:
    features = torch.randn(2, 16, 60, generator=drawn(seed), device="cpu")
    return {"input_features": features, "labels": tokens(seed, length=6)}


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "num_labels": 2,
}  # fmt: skip
SEQUENCE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def lm(name: str, given: dict[str, Any], **more: Any) -> Family:
    """A causal language model whose classes are named after it."""
    return Family(f"{name}ForCausalLM", f"{name}Config", {**given, **more}, causal, True)


FAMILIES: dict[str, Family] = {
    "llama": lm("Llama", GROUPED),
    "llama tied": lm("Llama", GROUPED, tie_word_embeddings=True),
    "mistral": lm("Mistral", GROUPED, sliding_window=8),
    "qwen2": lm("Qwen2", GROUPED),
    "qwen3": lm("Qwen3", HEADS),
    "gemma": lm("Gemma", HEADS),
    "gemma2": lm("Gemma2", HEADS, sliding_window=8),
    "phi": lm("Phi", TEXT),
    "phi3": lm("Phi3", GROUPED),
    "olmo2": lm("Olmo2", GROUPED),
    "granite": lm("Granite", GROUPED),
    "cohere": lm("Cohere", GROUPED),
    "stablelm": lm("StableLm", GROUPED),
    "starcoder2": lm("Starcoder2", GROUPED),
    "smollm3": lm("SmolLM3", GROUPED),
    "glm": lm("Glm", HEADS),
    "neox": lm("GPTNeoX", TEXT),
    "mixtral": lm("Mixtral", GROUPED, num_local_experts=4),
    "qwen2 experts": lm("Qwen2Moe", GROUPED, **ROUTED, num_experts=4,
                        shared_expert_intermediate_size=16),
    "qwen3 experts": lm("Qwen3Moe", HEADS, **ROUTED, num_experts=4),
    "olmo experts": lm("Olmoe", GROUPED, num_experts=4, num_experts_per_tok=2),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config",
                   {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 4,
                    "n_positions": 64, **SPECIAL}, causal, True),
    "gptj": lm("GPTJ", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 4,
                        "n_positions": 64, "rotary_dim": 4, **SPECIAL}),
    "opt": lm("OPT", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "ffn_dim": 48,
                      "num_hidden_layers": 3, "num_attention_heads": 4,
                      "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64, **SPECIAL}),
    "bloom": lm("Bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 3,
                          "n_head": 4, **SPECIAL}),
    "falcon": lm("Falcon", {"vocab_size": VOCABULARY, "hidden_size": WIDTH,
                            "num_hidden_layers": 3, "num_attention_heads": 4, **SPECIAL}),
    "mamba": lm("Mamba", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3,
                          "state_size": 8, **SPECIAL}),
    "gemma3 text": Family("Gemma3ForCausalLM", "Gemma3TextConfig",
                          {**HEADS, "sliding_window": 8}, causal, True),
    "gemma3n text": Family("Gemma3nForCausalLM", "Gemma3nTextConfig",
                           {**HEADS, "vocab_size_per_layer_input": VOCABULARY,
                            "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                            "num_kv_shared_layers": 1, "altup_num_inputs": 2,
                            "layer_types": ["sliding_attention", "full_attention",
                                            "full_attention"]}, causal, True, beside=48 << 10),
    "gemma4 text": Family("Gemma4ForCausalLM", "Gemma4TextConfig",
                          {**HEADS, "vocab_size_per_layer_input": VOCABULARY,
                           "hidden_size_per_layer_input": 8,
                           "layer_types": ["sliding_attention", "full_attention",
                                           "full_attention"]}, causal, True),
    "olmo3": lm("Olmo3", GROUPED, sliding_window=8),
    "glm4": lm("Glm4", HEADS),
    "exaone4": lm("Exaone4", GROUPED, sliding_window=8),
    "hunyuan": lm("HunYuanDenseV1", HEADS),
    "ernie": lm("Ernie4_5", HEADS),
    "nemotron": lm("Nemotron", GROUPED),
    "minicpm3": lm("MiniCPM3", {**TEXT, "num_key_value_heads": 4}, q_lora_rank=16,
                   kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    "gpt-oss": lm("GptOss", HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "deepseek v3": lm("DeepseekV3", {**TEXT, "num_key_value_heads": 4}, **ROUTED,
                      n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
                      q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                      v_head_dim=8),
    "llama4": Family("Llama4ForCausalLM", "Llama4TextConfig",
                     {**HEADS, "intermediate_size_mlp": 48, "num_local_experts": 4,
                      "interleave_moe_layer_step": 2}, causal, True),
    "glm4 experts": lm("Glm4Moe", HEADS, **ROUTED, n_routed_experts=4, n_group=1, topk_group=1,
                       first_k_dense_replace=1, n_shared_experts=1),
    "granite experts": lm("GraniteMoe", GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "mamba2": lm("Mamba2", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3,
                            "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2,
                            "chunk_size": 8, **SPECIAL}),
    "jamba": lm("Jamba", GROUPED, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
                mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
    "falcon h1": lm("FalconH1", GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8,
                    mamba_chunk_size=8),
    "bamba": lm("Bamba", GROUPED, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=8,
                mamba_chunk_size=8),
    "granite hybrid": lm("GraniteMoeHybrid", GROUPED, num_local_experts=4, mamba_n_heads=8,
                         shared_intermediate_size=16, mamba_d_state=8, mamba_chunk_size=8,
                         layer_types=["mamba", "attention", "mamba"]),
    "qwen3 next": lm("Qwen3Next", HEADS, **ROUTED, num_experts=4,
                     shared_expert_intermediate_size=16, linear_key_head_dim=8,
                     linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                     layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "lfm2": lm("Lfm2", GROUPED, layer_types=["conv", "full_attention", "conv"]),
    "recurrent gemma": lm("RecurrentGemma", TEXT, attention_window_size=8),
    "esm": Family("EsmForMaskedLM", "EsmConfig", {**TEXT, "mask_token_id": 4}, causal),
    "xlm-roberta": Family("XLMRobertaForMaskedLM", "XLMRobertaConfig", TEXT, causal),
    "bert": Family("BertForMaskedLM", "BertConfig", TEXT, causal),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", TEXT, causal),
    "distilbert": Family("DistilBertForSequenceClassification", "DistilBertConfig",
                         {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 48, "n_layers": 3,
                          "n_heads": 4, "max_position_embeddings": 64}, to_class, False, False),
    "albert": Family("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, causal,
                     False, False),
    "electra": Family("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 16},
                      causal),
    "deberta": Family("DebertaV2ForMaskedLM", "DebertaV2Config",
                      {**TEXT, "relative_attention": True, "position_buckets": 8,
                       "pos_att_type": ["p2c", "c2p"]}, causal, beside=48 << 10),
    "modernbert": Family("ModernBertForMaskedLM", "ModernBertConfig",
                         {**TEXT, "cls_token_id": 1, "sep_token_id": 2}, causal),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, to_sequence, True),
    "mt5": Family("MT5ForConditionalGeneration", "MT5Config", T5, to_sequence, True),
    "bart": Family("BartForConditionalGeneration", "BartConfig", SEQUENCE, to_sequence, True),
    "pegasus": Family("PegasusForConditionalGeneration", "PegasusConfig", SEQUENCE, to_sequence,
                      True),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig",
                      {**{k: v for k, v in SEQUENCE.items() if k != "max_position_embeddings"},
                       "num_mel_bins": 16, "max_source_positions": 30,
                       "max_target_positions": 64, "suppress_tokens": None,
                       "begin_suppress_tokens": None}, speech),
    "vit": Family("ViTForImageClassification", "ViTConfig", VISION, picture),
    "deit": Family("DeiTForImageClassification", "DeiTConfig", VISION, picture),
    "beit": Family("BeitForImageClassification", "BeitConfig",
                   {**VISION, "vocab_size": VOCABULARY}, picture),
    "dinov2": Family("Dinov2ForImageClassification", "Dinov2Config", VISION, picture),
    "siglip": Family("SiglipModel", "SiglipConfig",
                     {"text_config": {**TEXT, "projection_size": WIDTH},
                      "vision_config": VISION}, pair),
    "clip": Family("CLIPModel", "CLIPConfig",
                   {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}, pair),
    "convnext": Family("ConvNextForImageClassification", "ConvNextConfig",
                       {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1],
                        "num_labels": 2}, picture, False, False),
    "resnet": Family("ResNetForImageClassification", "ResNetConfig",
                     {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
                      "depths": [1, 1, 2, 1], "num_labels": 2}, picture, False, False),
    "segformer": Family("SegformerForImageClassification", "SegformerConfig",
                        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                         "hidden_sizes": [16, 32], "patch_sizes": [3, 3], "strides": [2, 2],
                         "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": 2},
                        picture, False, False),
    "swin": Family("SwinForImageClassification", "SwinConfig",
                   {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
                    "num_heads": [2, 4], "window_size": 4, "num_labels": 2}, picture),
}  # fmt: skip
