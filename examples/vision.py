"""An image classifier in a plain loop, its learning rate scheduled, its gradients clipped.

python examples/vision.py
"""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

import overspill


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, brighter in the upper or in the lower half."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(16, 3, 64, 64, generator=draw)
    labels = torch.randint(0, 2, (16,), generator=draw)
    for image, label in zip(pixels, labels, strict=True):
        image[:, 32 * label : 32 * label + 32] += 3.0
    return pixels, labels


torch.manual_seed(0)
model = ViTForImageClassification(
    ViTConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        image_size=64, patch_size=8, num_labels=2,
    )
)  # fmt: skip
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(inner, 0.1, 1.0, 10)
with overspill.wrap(model, inner, host_memory="32MiB") as optimizer:
    for step in range(80):
        pixels, labels = batch(step)
        loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}")
