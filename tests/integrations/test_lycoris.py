"""Networks of LyCORIS beside a streamed UNet: its layers are theirs to replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overspill
from tests.devices import about_sim, normal

KINDS = ("lora", "loha", "lokr", "ia3", "dylora", "glora", "diag-oft", "boft")
DECOMPOSED = ("lora", "loha", "lokr")
BLOCKS = ["Attention", "FeedForward", "ResnetBlock2D", "Transformer2DModel"]


def losses(kind: str, options: dict[str, Any], *, streamed: bool) -> list[float]:
    from diffusers import UNet2DConditionModel
    from lycoris import LycorisNetwork, create_lycoris

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32,
    )  # fmt: skip
    unet.requires_grad_(False)
    LycorisNetwork.apply_preset({"target_module": BLOCKS})
    network = create_lycoris(
        unet, 1.0, linear_dim=4, linear_alpha=2.0, conv_dim=4, conv_alpha=2.0, algo=kind, **options
    )
    network.apply_to()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    found = []
    engine = (
        overspill.wrap(unet, device="sim", device_memory="2MiB", host_memory="16MiB")
        if streamed
        else None
    )
    if engine is not None:
        layout = engine.plan.detail.layout
        assert layout is not None and sum(layout.streamed) > 8
    torch.manual_seed(1)  # some draw in forward
    for step in range(3):
        noise = normal(step, 2, 4, 16, 16)
        x, words = normal(9, 2, 4, 16, 16), normal(8, 2, 8, 32)
        time = torch.tensor([40 * step, 900 - step])
        loss = (unet(x + noise, time, words, return_dict=False)[0] - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if engine is not None:
        engine.close()
    return found


@about_sim
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS] + [(kind, {"dora_wd": True}) for kind in DECOMPOSED],
)
def test_a_network_trains_bit_for_bit(kind: str, options: dict[str, Any]) -> None:
    plain = losses(kind, options, streamed=False)
    assert len(set(plain)) == 3
    assert losses(kind, options, streamed=True) == plain
