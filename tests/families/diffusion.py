"""Model families of diffusers, tiny, built from their arguments: how to build one, and a batch."""

from __future__ import annotations

from typing import Any

import torch

from tests.families.table import Batch, Family, drawn

CAPTION, TEXT = 16, 6  # width and length of what a text encoder would give


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=drawn(seed), device="cpu")


def latents(
    *shape: int, out: tuple[int, ...] | None = None, name: str = "hidden_states", **more: Any
) -> Any:
    """Return a function that draws a batch: noisy latents, a time, and what is to be predicted.

    ``more``: further arguments; a tuple is the shape of a drawn tensor.
    """

    def batch(seed: int) -> Batch:
        made: dict[str, Any] = {
            name: randn(seed, *shape),
            "target": randn(seed + 500, *(out or shape)),
        }
        for k, (key, value) in enumerate(more.items()):
            made[key] = randn(seed + 1000 + k, *value) if isinstance(value, tuple) else value
        return made

    return batch


def family(model: str, batch: Any, *, recomputes: bool = True, **given: Any) -> Family:
    return Family(model, "", given, batch, False, recomputes, beside=64 << 10, library="diffusers")


COMPLEX = {"z image", "lumina2", "qwen image"}  # rotate by complex numbers
TIME = torch.tensor([3, 7], device="cpu")
WORDS = (2, TEXT, CAPTION)
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
IDS = {"img_ids": torch.zeros(16, 3, device="cpu"), "txt_ids": torch.zeros(TEXT, 3, device="cpu")}
MASK = torch.ones(2, TEXT, device="cpu")
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8,
}  # fmt: skip
BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": CAPTION, "attention_head_dim": 4,
}  # fmt: skip
VIDEO = (2, 4, 2, 8, 8)  # rows, channels, frames, height, width

DIFFUSION: dict[str, Family] = {
    "unet": family(
        "UNet2DModel", latents(2, 3, 16, 16, name="sample", timestep=TIME), **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "stable diffusion": family(
        "UNet2DConditionModel",
        latents(2, 4, 8, 8, name="sample", timestep=TIME, encoder_hidden_states=WORDS),
        **UNET, **BLOCKS,
    ),
    "stable diffusion xl": family(
        "UNet2DConditionModel",
        latents(
            2, 4, 8, 8, name="sample", timestep=TIME, encoder_hidden_states=WORDS,
            added_cond_kwargs={"text_embeds": randn(1, 2, 8), "time_ids": randn(2, 2, 6)},
        ),
        **UNET, **BLOCKS, transformer_layers_per_block=(1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 8,
    ),
    "controlnet": family(
        "ControlNetModel",
        latents(
            2, 4, 8, 8, name="sample", timestep=TIME, encoder_hidden_states=WORDS,
            controlnet_cond=(2, 3, 64, 64), out=(2, 8, 8, 8),
        ),
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=CAPTION,
        attention_head_dim=4, conditioning_embedding_out_channels=(4, 8, 8, 8),
    ),
    "autoencoder": family(
        "AutoencoderKL", latents(2, 3, 16, 16, name="sample"), block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4, latent_channels=4,
    ),
    "wan autoencoder": family(
        "AutoencoderKLWan", latents(1, 3, 5, 16, 16, name="sample"), recomputes=False, base_dim=4,
        z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ),
    "flux": family(
        "FluxTransformer2DModel",
        latents(2, 16, 4, encoder_hidden_states=WORDS, pooled_projections=(2, 8),
                timestep=TIME / 10, guidance=torch.ones(2), **IDS),
        in_channels=4, num_layers=2, num_single_layers=2, **HEADS, joint_attention_dim=CAPTION,
        pooled_projection_dim=8, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    ),
    "flux2": family(
        "Flux2Transformer2DModel",
        latents(2, 16, 4, encoder_hidden_states=WORDS, timestep=TIME / 10, guidance=torch.ones(2),
                img_ids=torch.zeros(2, 16, 4), txt_ids=torch.zeros(2, TEXT, 4)),
        in_channels=4, num_layers=2, num_single_layers=2, **HEADS, joint_attention_dim=CAPTION,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    ),
    "chroma": family(
        "ChromaTransformer2DModel",
        latents(2, 16, 4, encoder_hidden_states=WORDS, timestep=TIME / 10, **IDS),
        in_channels=4, num_layers=2, num_single_layers=2, **HEADS, joint_attention_dim=CAPTION,
        axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=2,
    ),
    "stable diffusion 3": family(
        "SD3Transformer2DModel",
        latents(2, 4, 8, 8, encoder_hidden_states=WORDS, pooled_projections=(2, 8), timestep=TIME),
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, **HEADS,
        joint_attention_dim=CAPTION, caption_projection_dim=32, pooled_projection_dim=8,
        pos_embed_max_size=8,
    ),
    "auraflow": family(
        "AuraFlowTransformer2DModel",
        latents(2, 4, 8, 8, encoder_hidden_states=WORDS, timestep=TIME / 10),
        sample_size=8, num_mmdit_layers=1, num_single_dit_layers=2, **HEADS,
        joint_attention_dim=CAPTION, caption_projection_dim=32, pos_embed_max_size=16,
    ),
    "qwen image": family(
        "QwenImageTransformer2DModel",
        latents(2, 16, 4, encoder_hidden_states=WORDS, timestep=TIME / 10,
                encoder_hidden_states_mask=MASK.long(), img_shapes=[(1, 4, 4)] * 2),
        in_channels=4, out_channels=4, patch_size=1, num_layers=3, **HEADS,
        joint_attention_dim=CAPTION, axes_dims_rope=(4, 4, 8),
    ),
    "z image": family(
        "ZImageTransformer2DModel",
        latents(4, 1, 8, 8, name="x", t=TIME[:1] / 10, cap_feats=(TEXT, CAPTION)),
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=CAPTION, axes_dims=[4, 4, 8], axes_lens=[64, 16, 16],
    ),
    "lumina2": family(
        "Lumina2Transformer2DModel",
        latents(2, 4, 8, 8, encoder_hidden_states=WORDS, timestep=TIME / 10,
                encoder_attention_mask=MASK.bool()),
        sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1,
        num_attention_heads=2, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 4, 8),
        axes_lens=(16, 16, 16), cap_feat_dim=CAPTION,
    ),
    "pixart": family(
        "PixArtTransformer2DModel",
        latents(2, 4, 8, 8, encoder_hidden_states=WORDS, timestep=TIME, out=(2, 8, 8, 8),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        sample_size=8, num_layers=3, **HEADS, cross_attention_dim=32, caption_channels=CAPTION,
        use_additional_conditions=False,
    ),
    "sana": family(
        "SanaTransformer2DModel", latents(2, 4, 8, 8, encoder_hidden_states=WORDS, timestep=TIME),
        in_channels=4, out_channels=4, num_layers=3, **HEADS, num_cross_attention_heads=2,
        cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=CAPTION,
        sample_size=8,
    ),
    "cogview4": family(
        "CogView4Transformer2DModel",
        latents(2, 4, 8, 8, encoder_hidden_states=WORDS, timestep=TIME, original_size=(2, 2),
                target_size=(2, 2), crop_coords=(2, 2)),
        in_channels=4, out_channels=4, num_layers=3, **HEADS, text_embed_dim=CAPTION,
        time_embed_dim=16, condition_dim=4, sample_size=8, rope_axes_dim=(8, 8),
    ),
    "dit": family(
        "DiTTransformer2DModel",
        latents(2, 4, 8, 8, timestep=TIME, class_labels=torch.tensor([1, 2], device="cpu")),
        sample_size=8, num_layers=3, **HEADS, num_embeds_ada_norm=8,
    ),
    "wan": family(
        "WanTransformer3DModel", latents(*VIDEO, timestep=TIME, encoder_hidden_states=WORDS),
        **HEADS, in_channels=4, out_channels=4, text_dim=CAPTION, freq_dim=16, ffn_dim=48,
        num_layers=3, rope_max_seq_len=32,
    ),
    "hunyuan video": family(
        "HunyuanVideoTransformer3DModel",
        latents(*VIDEO, timestep=TIME, encoder_hidden_states=WORDS, encoder_attention_mask=MASK,
                pooled_projections=(2, 8), guidance=torch.ones(2)),
        in_channels=4, out_channels=4, **HEADS, num_layers=1, num_single_layers=2,
        num_refiner_layers=1, text_embed_dim=CAPTION, pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 8),
    ),
    "ltx video": family(
        "LTXVideoTransformer3DModel",
        latents(2, 2 * 4 * 4, 4, timestep=TIME, encoder_hidden_states=WORDS,
                encoder_attention_mask=MASK, num_frames=2, height=4, width=4),
        in_channels=4, out_channels=4, **HEADS, cross_attention_dim=32, caption_channels=CAPTION,
        num_layers=3,
    ),
    "cogvideox": family(
        "CogVideoXTransformer3DModel",
        latents(2, 2, 4, 8, 8, timestep=TIME, encoder_hidden_states=WORDS),
        in_channels=4, out_channels=4, **HEADS, time_embed_dim=8, text_embed_dim=CAPTION,
        num_layers=3, sample_width=8, sample_height=8, sample_frames=8, max_text_seq_length=TEXT,
    ),
    "mochi": family(
        "MochiTransformer3DModel",
        latents(*VIDEO, timestep=TIME, encoder_hidden_states=WORDS,
                encoder_attention_mask=MASK.bool()),
        in_channels=4, num_layers=3, num_attention_heads=2, attention_head_dim=16,
        pooled_projection_dim=16, text_embed_dim=CAPTION, time_embed_dim=16,
        max_sequence_length=TEXT,
    ),
}  # fmt: skip
