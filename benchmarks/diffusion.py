"""LoRA on a Flux-shaped transformer of diffusers, with room for about two blocks on the device.

Beside the model in memory are a plain block swap, and diffusers' group offloading.  The device is
``sim``, so "copies" are copies within host memory, over a link that is as fast as PCIe 4 with 16
lanes.  The swap waits for the same link.  Group offloading has no link here: it calls its hooks and
moves nothing.  One core is left to the copies, in place of a GPU's copy engine: compute of all arms
runs on the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill

from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Arm, Call, run_interleaved

LINK_BYTES_S = 25e9  # PCIe 4 x16, of its 31.5 GB/s about four fifths
RANK, LAYERS = 16, ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass(frozen=True)
class FluxShape:
    """Heads of 64, double and single blocks, patches and words of a picture."""

    heads: int
    double: int
    single: int
    patches: int
    words: int

    def build(self) -> Any:
        """The transformer with adapters, the same every time."""
        from diffusers import FluxTransformer2DModel
        from peft import LoraConfig

        torch.manual_seed(0)
        made = FluxTransformer2DModel(
            in_channels=64, num_layers=self.double, num_single_layers=self.single,
            attention_head_dim=64, num_attention_heads=self.heads, joint_attention_dim=256,
            pooled_projection_dim=128, axes_dims_rope=(8, 28, 28),
        )  # fmt: skip
        made.requires_grad_(False)
        made.add_adapter(LoraConfig(r=RANK, target_modules=LAYERS))
        return made

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """Latents, embeddings and times, drawn by a seed."""
        draw = torch.Generator().manual_seed(seed)
        return {
            "hidden_states": torch.randn(1, self.patches, 64, generator=draw),
            "encoder_hidden_states": torch.randn(1, self.words, 256, generator=draw),
            "pooled_projections": torch.randn(1, 128, generator=draw),
            "timestep": torch.rand(1, generator=draw),
            "img_ids": torch.zeros(self.patches, 3),
            "txt_ids": torch.zeros(self.words, 3),
        }


QUICK = FluxShape(heads=4, double=2, single=2, patches=64, words=16)
SMALL_PICTURE = FluxShape(heads=8, double=4, single=8, patches=256, words=64)  # 256 x 256 pixels
PICTURE = FluxShape(heads=8, double=4, single=8, patches=1024, words=64)  # 512 x 512


def blocks(model: Any) -> list[nn.Module]:
    """The blocks that a swap moves."""
    return [*model.transformer_blocks, *model.single_transformer_blocks]


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def swap_blocks(model: Any) -> None:
    """Copy a block's frozen weights before its forward and its backward, and wait for the link."""
    largest = max(
        sum(p.numel() for p in block.parameters() if not p.requires_grad) for block in blocks(model)
    )
    room = torch.empty(largest)

    def bring(homes: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        started, used = time.perf_counter(), 0
        for parameter, home in homes:
            place = room[used : used + home.numel()].view(home.shape)
            parameter.data = place.copy_(home)
            used += home.numel()
        left = 4 * used / LINK_BYTES_S - (time.perf_counter() - started)
        time.sleep(max(0.0, left))

    for block in blocks(model):
        homes = [(p, p.data) for p in block.parameters() if not p.requires_grad]
        block.register_forward_pre_hook(lambda *_, homes=homes: bring(homes))
        block.register_full_backward_pre_hook(lambda *_, homes=homes: bring(homes))


def _arm(name: str, model: Any, optimizer: Any, shape: FluxShape, losses: list[float]) -> Arm:
    def run() -> float:
        started = time.perf_counter()
        batch = shape.batch(len(losses))
        loss = model(**batch, return_dict=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return time.perf_counter() - started

    return Call(name, run)


def _inner(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def measure(shape: FluxShape, rounds: int) -> Comparison:
    """Steps of all arms, in turns."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    models = [shape.build() for _ in range(4)]
    plain, swapped, grouped, ours = models
    swap_blocks(swapped)
    grouped.enable_group_offload(
        onload_device=torch.device("cpu"), offload_device=torch.device("cpu"),
        offload_type="block_level", num_blocks_per_group=1,
    )  # fmt: skip
    rates = overspill.Rates(h2d_bytes_s=LINK_BYTES_S, d2h_bytes_s=LINK_BYTES_S)
    room = 2 * max(map(_bytes, blocks(ours)))
    options: dict[str, Any] = {
        "device": "sim", "rates": rates, "host_memory": 2 * _bytes(ours) + (64 << 20),
        "activations": "keep",
    }  # fmt: skip
    plan = overspill.plan(ours, _inner(ours), device_memory=room, **options)
    least = plan.detail.fitting.get("device_memory", room)
    wrapped = overspill.wrap(ours, _inner(ours), device_memory=least, **options)
    told = {"two blocks": room, "budget": wrapped.memory["device"].budget_bytes,  # type: ignore[index]
            "weights": _bytes(plain)}  # fmt: skip
    losses: list[list[float]] = [[] for _ in models]
    names = ("in memory", "block swap", "diffusers' group offloading", "overspill")
    optimizers = [_inner(plain), _inner(swapped), _inner(grouped), wrapped]
    try:
        rows = run_interleaved(
            [
                _arm(name, model, optimizer, shape, found)
                for name, model, optimizer, found in zip(
                    names, models, optimizers, losses, strict=True
                )
            ],
            rounds,
        )
    finally:
        wrapped.close()
    apart = max(
        abs(a - b) / b for found in losses[1:] for a, b in zip(found, losses[0], strict=True)
    )
    columns: list[Column] = [
        ("step", lambda row: number(row.median_s, " s")),
        ("over in memory", spread),
        ("others", others),
    ]
    return Comparison(
        f"LoRA on a Flux shape, {_bytes(plain) >> 20} MiB of weights, "
        f"{shape.patches + shape.words} tokens; overspill in {told['budget'] >> 20} MiB of "
        f"device memory (two blocks take {room >> 20} MiB); losses within {apart:.0e}",
        {**told, "losses": losses},
        rows,
        columns,
    )


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite."""
    cases = [(QUICK, 3)] if quick else [(SMALL_PICTURE, 15), (PICTURE, 9)]
    return outcome("diffusion", [measure(*case) for case in cases], folder)
