"""LoRA on a Flux transformer of diffusers that does not fit on the device: a plain loop.

The model is tiny and random, and latents and prompts are noise, so that it runs anywhere in
seconds.  With a real one, load it with FluxTransformer2DModel.from_pretrained, and encode images
and prompts beforehand, as the scripts of diffusers do.

python examples/flux_lora.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

import overspill

CHANNELS, PATCHES, WORDS, TEXT, POOLED = 16, 16, 8, 32, 16
torch.manual_seed(0)
transformer = FluxTransformer2DModel(
    in_channels=CHANNELS, num_layers=2, num_single_layers=4, attention_head_dim=16,
    num_attention_heads=4, joint_attention_dim=TEXT, pooled_projection_dim=POOLED,
    axes_dims_rope=(4, 4, 8),
)  # fmt: skip
transformer.requires_grad_(False)
transformer.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
adapters = [p for p in transformer.parameters() if p.requires_grad]
inner = torch.optim.AdamW(adapters, lr=1e-2)
# Frozen blocks are streamed; frozen="nf4" would move a quarter of the bytes.
optimizer = overspill.wrap(
    transformer, inner, device="sim", device_memory="2MiB", host_memory="16MiB"
)  # fmt: skip

clean = torch.randn(4, PATCHES, CHANNELS)
prompts, pooled = torch.randn(4, WORDS, TEXT), torch.randn(4, POOLED)
ids = {"img_ids": torch.zeros(PATCHES, 3), "txt_ids": torch.zeros(WORDS, 3)}
for step in range(30):
    noise, time = torch.randn_like(clean), torch.rand(4)
    part = time[:, None, None]
    predicted = transformer(
        hidden_states=(1 - part) * clean + part * noise, timestep=time,
        encoder_hidden_states=prompts, pooled_projections=pooled, return_dict=False, **ids,
    )[0]  # fmt: skip
    loss = torch.nn.functional.mse_loss(predicted, noise - clean)  # flow matching
    loss.backward()
    torch.nn.utils.clip_grad_norm_(adapters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}  loss {loss.item():.4f}")

if len(sys.argv) > 1:  # as FluxPipeline.load_lora_weights reads it
    FluxPipeline.save_lora_weights(sys.argv[1], get_peft_model_state_dict(transformer))
overspill.unwrap(transformer)
