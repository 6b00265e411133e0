"""A sequence whose activations have no room: they leave for host memory and disk, or are computed
again, whichever is faster; the loop stays as it is.

    python examples/long_context.py OUT [--seq 2048] [--steps 3]

Trains a small Llama with random weights on random bytes under a budget that its activations alone
exceed.  For a real one: your model and data, ``device_memory="20GiB"`` on a GPU, and
``overspill plan MODEL --seq 131072`` to see what has room.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overspill

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out")
parser.add_argument("--seq", type=int, default=2048)
parser.add_argument("--steps", type=int, default=3)
given = parser.parse_args()

store = pathlib.Path(given.out) / "store"
store.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=given.seq,
        use_cache=False,  # layers that are called with a cache cannot be recomputed
    )
)  # fmt: skip
optimizer = overspill.wrap(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    device_memory="auto" if torch.cuda.is_available() else "24MiB",
    device="cuda" if torch.cuda.is_available() else "sim",
    host_memory="64MiB",
    nvme=store,
    durable=False,
)
device = next(model.parameters()).device
with optimizer:
    for step in range(given.steps):
        batch = torch.randint(0, 256, (1, given.seq), device=device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = optimizer.stats.lanes["copy_out"].bytes / 2**20
        print(f"step {step + 1}  loss {loss.item():.4f}  {moved:.0f} MiB left the device")
    for tier, stats in optimizer.memory.items():
        print(f"{tier.value}: at most {stats.peak_bytes >> 20} of {stats.budget_bytes >> 20} MiB")
