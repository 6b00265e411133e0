"""200 steps of a small Llama whose activations move as int8: the losses of one where they stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.devices import SIM, about_sim

transformers = pytest.importorskip("transformers")
BATCH, LENGTH, WARMUP = 4, 256, 20


def batches(steps: int) -> list[torch.Tensor]:
    """Bytes of Python's own library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:120]
    text = bytearray(b"".join(file.read_bytes() for file in files))
    tokens = torch.frombuffer(text, dtype=torch.uint8)
    draw = torch.Generator("cpu").manual_seed(1)
    starts = torch.randint(len(tokens) - LENGTH, (steps, BATCH), generator=draw, device="cpu")
    return [torch.stack([tokens[i : i + LENGTH] for i in row]).long() for row in starts]


def losses(folder: Path, dtype: torch.dtype, steps: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given = {"device": SIM, "host_memory": "600MiB", "nvme": folder, "durable": False, **options}
    found = []
    with overspill.wrap(model, adamw, tokens=BATCH * LENGTH, max_grad_norm=1.0, **given) as one:
        warmup = torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1, (step + 1) / WARMUP))
        for batch in batches(steps):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            one.step()
            warmup.step()
            one.zero_grad()
            found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def both(folder: Path, dtype: torch.dtype, steps: int) -> torch.Tensor:
    """The differences of the losses."""
    kept = losses(folder, dtype, steps, device_memory="200MiB", activations="keep")
    packed = losses(
        folder, dtype, steps, device_memory="64MiB", activations="host", activations_format="int8"
    )
    assert packed[0] == kept[0], "forward is exact"
    assert not torch.equal(packed, kept)
    return packed - kept


@about_sim
def test_losses_are_nearly_those_of_activations_that_stay(tmp_path: Path) -> None:
    assert both(tmp_path, torch.float32, 10).abs().max() < 2e-4


@about_sim
@pytest.mark.soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_200_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    """A few steps, where the loss falls fast, differ by more than 1e-3."""
    differences = both(tmp_path, dtype, 200)
    assert differences.abs().max() < 2e-3
    assert differences.mean().abs() < (2e-4 if dtype is torch.float32 else 4e-4)
    if dtype is torch.float32:
        assert (differences.abs() > 1e-3).sum() <= 1
