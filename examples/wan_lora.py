"""LoRA on a video model of diffusers (Wan) whose frozen blocks are kept in 4 bits.

The model is tiny and random, and videos and prompts are noise, so that it runs anywhere in
seconds.  With a real one, load it with WanTransformer3DModel.from_pretrained, and encode videos and
prompts beforehand: the caches of latents and embeddings are small.

python examples/wan_lora.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

import overspill

CHANNELS, FRAMES, SIZE, WORDS, TEXT = 16, 3, 8, 8, 32
torch.manual_seed(0)
transformer = WanTransformer3DModel(
    num_attention_heads=4, attention_head_dim=16, in_channels=CHANNELS, out_channels=CHANNELS,
    text_dim=TEXT, freq_dim=32, ffn_dim=128, num_layers=6, rope_max_seq_len=32,
)  # fmt: skip
transformer.requires_grad_(False)
transformer.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
transformer.enable_gradient_checkpointing()
adapters = [p for p in transformer.parameters() if p.requires_grad]
optimizer = overspill.wrap(
    transformer, torch.optim.AdamW(adapters, lr=5e-3), device="sim", device_memory="2MiB",
    host_memory="16MiB", frozen="nf4", activations="host",
)  # fmt: skip

clean, prompts = torch.randn(2, CHANNELS, FRAMES, SIZE, SIZE), torch.randn(2, WORDS, TEXT)
for step in range(20):
    noise, time = torch.randn_like(clean), torch.rand(2)
    part = time[:, None, None, None, None]
    predicted = transformer(
        hidden_states=(1 - part) * clean + part * noise, timestep=1000 * time,
        encoder_hidden_states=prompts, return_dict=False,
    )[0]  # fmt: skip
    loss = torch.nn.functional.mse_loss(predicted, noise - clean)  # flow matching
    loss.backward()
    torch.nn.utils.clip_grad_norm_(adapters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}  loss {loss.item():.4f}")

if len(sys.argv) > 1:  # as WanPipeline.load_lora_weights reads it
    WanPipeline.save_lora_weights(sys.argv[1], get_peft_model_state_dict(transformer))
overspill.unwrap(transformer)
