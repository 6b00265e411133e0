"""A training script in the shape of diffusers' own, which knows nothing of overspill.

Arguments: what is trained, the folder to write, steps, and a checkpoint to resume from, or "".
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
    WanTransformer3DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, cast_training_params
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

TEXT, WORDS, STEPS_OF_NOISE = 32, 8, 1000
KIND, OUT, STEPS, RESUME = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
accelerator = Accelerator(
    gradient_accumulation_steps=2 if KIND == "text to image" else 1,
    project_config=ProjectConfiguration(project_dir=OUT),
)
set_seed(0)
unet_shape = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
heads = {"attention_head_dim": 16, "num_attention_heads": 2}
if KIND == "unconditional":
    model = UNet2DModel(
        sample_size=8, in_channels=4, out_channels=4, **unet_shape,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
elif KIND == "flux lora":
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT, axes_dims_rope=(4, 4, 8), **heads,
    )  # fmt: skip
elif KIND == "sd3 lora":
    model = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, joint_attention_dim=TEXT,
        caption_projection_dim=32, pooled_projection_dim=TEXT, pos_embed_max_size=8, **heads,
    )  # fmt: skip
elif KIND == "wan lora":
    model = WanTransformer3DModel(
        in_channels=4, out_channels=4, text_dim=TEXT, freq_dim=16, ffn_dim=48, num_layers=3,
        rope_max_seq_len=32, **heads,
    )  # fmt: skip
else:
    model = UNet2DConditionModel(
        sample_size=8, cross_attention_dim=TEXT, **unet_shape,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
text_encoder = CLIPTextModel(
    CLIPTextConfig(
        vocab_size=64, hidden_size=TEXT, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=WORDS, bos_token_id=1, eos_token_id=2,
    )
)  # fmt: skip
noises = DDPMScheduler(num_train_timesteps=STEPS_OF_NOISE)
both = KIND == "dreambooth with its text encoder"
vae.requires_grad_(False)
text_encoder.requires_grad_(both)
if KIND.endswith("lora"):
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    cast_training_params(model)
    model.enable_gradient_checkpointing()
average = None
if KIND in ("unconditional", "text to image"):
    average = EMAModel(
        model.parameters(), 0.9, use_ema_warmup=True, model_cls=type(model),
        model_config=model.config,
    )  # fmt: skip


def save_hook(models, weights, folder):
    if average is not None:
        average.save_pretrained(os.path.join(folder, "average"))
    for each in models:
        if KIND.endswith("lora"):
            adapters = get_peft_model_state_dict(accelerator.unwrap_model(each))
            save_file(
                {k: v.contiguous() for k, v in adapters.items()}, f"{folder}/lora.safetensors"
            )
        else:
            name = "text_encoder" if isinstance(each, CLIPTextModel) else "model"
            accelerator.unwrap_model(each).save_pretrained(os.path.join(folder, name))
        if weights:
            weights.pop()


def load_hook(models, folder):
    if average is not None:
        loaded = EMAModel.from_pretrained(os.path.join(folder, "average"), type(model))
        average.load_state_dict(loaded.state_dict())
        average.to(accelerator.device)
    while models:
        each = models.pop()
        if KIND.endswith("lora"):
            set_peft_model_state_dict(each, load_file(f"{folder}/lora.safetensors"))
            cast_training_params(each)
        else:
            name = "text_encoder" if isinstance(each, CLIPTextModel) else "model"
            kind = type(accelerator.unwrap_model(each))
            each.load_state_dict(kind.from_pretrained(os.path.join(folder, name)).state_dict())


accelerator.register_save_state_pre_hook(save_hook)
accelerator.register_load_state_pre_hook(load_hook)
trained = {"model": model, "text_encoder": text_encoder} if both else model
params = [p for p in model.parameters() if p.requires_grad]
params = itertools.chain(params, text_encoder.parameters()) if both else params
optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
videos = (4, 2, 8, 8) if KIND == "wan lora" else (4, 8, 8)
data = torch.utils.data.TensorDataset(
    torch.randn(16, *videos if KIND == "wan lora" else (3, 8, 8)),
    torch.randint(3, 64, (16, WORDS)),
)
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
if both:
    text_encoder = accelerator.prepare(text_encoder)
else:
    text_encoder.to(accelerator.device)
vae.to(accelerator.device)
if average is not None:
    average.to(accelerator.device)


def predict(noisy, times, captions, of=None):
    of = of or model
    with torch.set_grad_enabled(both and torch.is_grad_enabled()):
        words = text_encoder(captions)
    hidden, pooled = words.last_hidden_state, words.pooler_output
    if KIND == "unconditional":
        return of(noisy, times, return_dict=False)[0]
    if KIND == "flux lora":
        packed = noisy.flatten(2).transpose(1, 2)
        made = of(
            hidden_states=packed, encoder_hidden_states=hidden, pooled_projections=pooled,
            timestep=times / STEPS_OF_NOISE, img_ids=packed.new_zeros(packed.shape[1], 3),
            txt_ids=packed.new_zeros(WORDS, 3), return_dict=False,
        )[0]  # fmt: skip
        return made.transpose(1, 2).reshape(noisy.shape)
    more = {"pooled_projections": pooled} if KIND == "sd3 lora" else {}
    name = "sample" if KIND not in ("sd3 lora", "wan lora") else "hidden_states"
    return of(
        **{name: noisy}, timestep=times, encoder_hidden_states=hidden, return_dict=False, **more
    )[0]  # fmt: skip


@torch.no_grad()
def validate():
    latents, (_, captions) = torch.randn(1, *videos), data[:1]
    latents = latents.to(accelerator.device)
    noises.set_timesteps(3, device=accelerator.device)
    for time in noises.timesteps:
        made = predict(
            latents, time[None], captions.to(accelerator.device), accelerator.unwrap_model(model)
        )
        latents = noises.step(made, time, latents).prev_sample
    return latents.sum().item()


step, losses = 0, []
if RESUME:
    accelerator.load_state(RESUME)
    step = int(RESUME.rpartition("-")[2])
while step < STEPS:
    for pictures, captions in loader:
        with accelerator.accumulate(model):
            torch.manual_seed(100 + len(losses) + 1000 * step)
            with torch.no_grad():
                clean = (
                    pictures if KIND == "wan lora" else vae.encode(pictures).latent_dist.sample()
                )
            noise = torch.randn(clean.shape).to(clean.device)
            times = torch.randint(0, STEPS_OF_NOISE, (len(clean),)).to(clean.device)
            made = predict(noises.add_noise(clean, noise, times), times, captions)
            loss = torch.nn.functional.mse_loss(made.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1e9)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            step += 1
            if average is not None:
                average.step(model.parameters())
            if step % 2 == 0:
                accelerator.save_state(os.path.join(OUT, f"checkpoint-{step}"))
                losses.append(validate())
        if step >= STEPS:
            break

model = accelerator.unwrap_model(model)
if average is not None:
    average.copy_to(model.parameters())
if KIND.endswith("lora"):
    model = model.to(torch.float32)
    adapters = get_peft_model_state_dict(model)
    save_file({k: v.contiguous() for k, v in adapters.items()}, OUT / "lora.safetensors")
else:
    model.save_pretrained(OUT / "model")
if both:
    accelerator.unwrap_model(text_encoder).save_pretrained(OUT / "text_encoder")
