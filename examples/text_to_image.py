"""All weights of Stable Diffusion's UNet, in the shape of diffusers' train_text_to_image.py.

Accelerate, an average of the weights, a picture sampled in the middle of the training, a checkpoint
that holds all of it, and the files of the pipeline at the end.  The model is tiny and random, so
that it runs anywhere in seconds; the text encoder and the autoencoder are left out, as latents and
embeddings are computed beforehand.

python examples/text_to_image.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader, TensorDataset

import overspill
from overspill.integrations.accelerate import OffloadAccelerator

out, TEXT, WORDS, STEPS = Path(sys.argv[1]), 32, 8, 24
torch.manual_seed(0)
unet = UNet2DConditionModel(
    block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, sample_size=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=TEXT,
)  # fmt: skip
data = TensorDataset(torch.randn(32, 4, 8, 8), torch.randn(32, WORDS, TEXT))
noises = DDPMScheduler(num_train_timesteps=1000)

accelerator = OffloadAccelerator(
    gradient_accumulation_steps=2, project_config=ProjectConfiguration(project_dir=out)
)
inner = overspill.ema(torch.optim.AdamW(unet.parameters(), lr=1e-3), 0.9)
wrapped = optimizer = overspill.wrap(
    unet, inner, device="sim", device_memory="8MiB", host_memory="64MiB"
)
schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
loader = DataLoader(data, batch_size=4, shuffle=True)
unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)


@torch.no_grad()
def sample() -> torch.Tensor:
    """A picture's latents, as a validation pipeline makes them."""
    latents, caption = torch.randn(1, 4, 8, 8), data.tensors[1][:1]
    noises.set_timesteps(4)
    for time in noises.timesteps:
        latents = noises.step(unet(latents, time, caption).sample, time, latents).prev_sample
    return latents


step = 0
while step < STEPS:
    for latents, captions in loader:
        with accelerator.accumulate(unet):
            noise, times = torch.randn_like(latents), torch.randint(0, 1000, (len(latents),))
            noisy = noises.add_noise(latents, noise, times)
            loss = torch.nn.functional.mse_loss(unet(noisy, times, captions).sample, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % 6 == 0:
                print(f"step {step}  loss {loss.item():.4f}")
            if step % 12 == 0:
                accelerator.save_state(str(out / "checkpoint"))
                with wrapped.averaged():
                    print(f"sampled latents of norm {sample().norm().item():.2f}")

accelerator.unwrap_model(unet).save_pretrained(out / "unet")
wrapped.save_average(out / "averaged")
