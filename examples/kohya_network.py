"""A LoRA network beside the model, as kohya's sd-scripts and LyCORIS build it.

Such a network replaces the ``forward`` of layers, and its weights are no part of the model.  So
the model is wrapped without an optimizer: its frozen blocks are streamed, and the network, which is
small, is trained by an optimizer of its own.

python examples/kohya_network.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn

import overspill

RANK, TEXT, WORDS = 4, 32, 8


class LoRAModule(nn.Module):
    """Adds a low-rank product to what a linear layer computes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.lora_down = nn.Linear(layer.in_features, RANK, bias=False)
        self.lora_up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.org_forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        layer.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.org_forward(x) + self.lora_up(self.lora_down(x))


torch.manual_seed(0)
unet = UNet2DConditionModel(
    block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, sample_size=16,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=TEXT,
)  # fmt: skip
unet.requires_grad_(False)
network = nn.ModuleDict(
    {
        name.replace(".", "_"): LoRAModule(layer)
        for name, layer in list(unet.named_modules())
        if isinstance(layer, nn.Linear) and "attn" in name
    }
)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
streamed = overspill.wrap(unet, device="sim", device_memory="2MiB", host_memory="16MiB")

latents, captions = torch.randn(4, 4, 16, 16), torch.randn(4, WORDS, TEXT)
for step in range(20):
    noise, time = torch.randn_like(latents), torch.randint(0, 1000, (4,))
    part = (time / 1000)[:, None, None, None]
    noisy = (1 - part).sqrt() * latents + part.sqrt() * noise
    predicted = unet(noisy, time, captions, return_dict=False)[0]
    loss = torch.nn.functional.mse_loss(predicted, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}  loss {loss.item():.4f}")

if len(sys.argv) > 1:
    weights = {f"lora_unet_{name}": value for name, value in network.state_dict().items()}
    save_file(weights, f"{sys.argv[1]}/lora.safetensors")
streamed.close()
