"""Families that read pictures or sound, tiny: how to build one, and a batch.

A tower for pictures runs once in the first step, not at all in the second, and twice in the third.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.families.table import (
    GROUPED,
    HEADS,
    SPECIAL,
    TEXT,
    VISION,
    VOCABULARY,
    WIDTH,
    Batch,
    Family,
    drawn,
    tokens,
)

PICTURE, START, END, VIDEO = 120, 121, 122, 123  # tokens
SECONDS = 1600  # samples of sound


def looking(
    count: int, pixels: Callable[[torch.Generator], dict[str, Any]], **more: Any
) -> Callable[[int], Batch]:
    """Return a function that draws two rows of text, each with ``count`` tokens for a picture."""

    def batch(seed: int) -> Batch:
        ids = tokens(seed, length=count + 8) % 100 + 3
        if seed % 3 == 1:
            return {"input_ids": ids, "labels": ids}
        ids[:, 1], ids[:, 2 : 2 + count], ids[:, 2 + count] = START, PICTURE, END
        labels = ids.masked_fill(ids >= PICTURE, -100)
        made: Batch = {"input_ids": ids, "labels": labels, **pixels(drawn(seed)), **more}
        if seed % 3 == 2:
            made["again"] = ids.flip(0)
        return made

    return batch


def whole(*shape: int, name: str = "pixel_values", **more: Any) -> Callable[..., dict[str, Any]]:
    """Pictures as they are."""
    return lambda generator: {
        name: torch.randn(*shape, generator=generator, device="cpu"), **more
    }  # fmt: skip


def patches(size: int) -> Callable[..., dict[str, Any]]:
    """Two pictures as Qwen's models take them: rows of patches, and how many in each direction."""
    grid = torch.tensor([[1, 4, 4]] * 2, device="cpu")
    return whole(32, 3 * 2 * size * size, image_grid_thw=grid)


def sees(name: str, batch: Any, *, beside: int = 0, **given: Any) -> Family:
    model, config = f"{name}ForConditionalGeneration", f"{name}Config"
    return Family(model, config, given, batch, False, True, beside)


def kinds(count: int, length: int) -> torch.Tensor:
    """1 at the tokens of a picture."""
    found = torch.zeros(2, length, dtype=torch.long, device="cpu")
    found[:, 2 : 2 + count] = 1
    return found


QWEN: dict[str, Any] = {
    "image_token_id": PICTURE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
TOWER = {"depth": 2, "num_heads": 4, "patch_size": 8}
IMAGE = whole(2, 3, 32, 32)
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
SOUND: dict[str, Any] = {
    **{k: v for k, v in TEXT.items() if k not in ("max_position_embeddings", "bos_token_id")},
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (10, 4),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0,
    "mask_time_length": 2, "ctc_zero_infinity": True,
}  # fmt: skip


def sound(seed: int) -> Batch:
    """Samples, and the letters said."""
    samples = torch.randn(2, SECONDS, generator=drawn(seed), device="cpu")
    return {"input_values": samples, "labels": tokens(seed, length=6)}


def spectrogram(seed: int) -> Batch:
    features = torch.randn(2, 40, 16, generator=drawn(seed), device="cpu")
    return {"input_values": features, "labels": torch.tensor([0, 1], device="cpu")}


def said(seed: int) -> Batch:
    samples = torch.randn(2, SECONDS, generator=drawn(seed), device="cpu")
    return {"input_values": samples, "labels": tokens(seed, length=6)}


def heard(seed: int) -> Batch:
    """Text with the sound it speaks of."""
    count = 10
    ids = tokens(seed, length=count + 8) % 100 + 3
    ids[:, 2 : 2 + count] = PICTURE
    return {
        "input_ids": ids, "labels": ids.masked_fill(ids >= PICTURE, -100),
        "input_features": torch.randn(2, 16, 40, generator=drawn(seed), device="cpu"),
        "feature_attention_mask": torch.ones(2, 40, dtype=torch.long, device="cpu"),
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip


MULTIMODAL: dict[str, Family] = {
    "llava": sees(
        "Llava", looking(16, IMAGE), text_config={"model_type": "llama", **GROUPED},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=PICTURE, image_seq_length=16,
    ),
    "qwen2 vl": sees(
        "Qwen2VL", looking(4, patches(8), mm_token_type_ids=kinds(4, 12)), **QWEN,
        text_config={**GROUPED, **ROPE},
        vision_config={**TOWER, "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2},
    ),
    "qwen2.5 vl": sees(
        "Qwen2_5_VL", looking(4, patches(8), mm_token_type_ids=kinds(4, 12)), **QWEN,
        text_config={**GROUPED, **ROPE},
        vision_config={**TOWER, "hidden_size": WIDTH, "intermediate_size": 48, "window_size": 32,
                       "out_hidden_size": WIDTH, "fullatt_block_indexes": [1]},
    ),
    "qwen3 vl": sees(
        "Qwen3VL", looking(4, patches(8), mm_token_type_ids=kinds(4, 12)), **QWEN,
        text_config={**HEADS, **ROPE},
        vision_config={**TOWER, "hidden_size": WIDTH, "intermediate_size": 48,
                       "out_hidden_size": WIDTH, "deepstack_visual_indexes": [0],
                       "num_position_embeddings": 16},
    ),
    "smolvlm": sees(
        "SmolVLM", looking(4, whole(2, 1, 3, 32, 32)), image_token_id=PICTURE, scale_factor=2,
        text_config={"model_type": "llama", **GROUPED}, vision_config=VISION,
    ),
    "idefics3": sees(
        "Idefics3", looking(4, whole(2, 1, 3, 32, 32)), image_token_id=PICTURE, scale_factor=2,
        text_config={"model_type": "llama", **GROUPED}, vision_config=VISION,
    ),
    "gemma3": sees(
        "Gemma3", looking(4, IMAGE, token_type_ids=kinds(4, 12)), text_config=HEADS,
        vision_config=VISION, image_token_index=PICTURE, mm_tokens_per_image=4,
    ),
    "internvl": sees(
        "InternVL", looking(4, IMAGE), image_token_id=PICTURE, image_seq_length=4,
        text_config={"model_type": "qwen2", **GROUPED},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
    ),
    "paligemma": sees(
        "PaliGemma", looking(16, IMAGE, token_type_ids=kinds(16, 24)), vision_config=VISION,
        text_config={"model_type": "gemma", **HEADS}, image_token_index=PICTURE,
        projection_dim=WIDTH, hidden_size=WIDTH,
    ),
    "wav2vec2": Family("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, sound),
    "hubert": Family("HubertForCTC", "HubertConfig", {**SOUND, "layerdrop": 0.3}, sound),
    "wavlm": Family("WavLMForCTC", "WavLMConfig", SOUND, sound),
    "spectrogram": Family(
        "ASTForAudioClassification", "ASTConfig",
        {**VISION, "num_mel_bins": 16, "max_length": 40, "frequency_stride": 8, "time_stride": 8},
        spectrogram,
    ),
    "moonshine": Family(
        "MoonshineForConditionalGeneration", "MoonshineConfig",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48,
         "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
         "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, **SPECIAL},
        said,
    ),
    "qwen2 audio": sees(
        "Qwen2Audio", heard, text_config={"model_type": "qwen2", **GROUPED},
        audio_config={"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4,
                      "encoder_ffn_dim": 48, "d_model": WIDTH, "max_source_positions": 20},
        audio_token_index=PICTURE,
    ),
}  # fmt: skip
