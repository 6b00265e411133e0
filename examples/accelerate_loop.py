"""A loop of accelerate's with a wrapped model: gradients accumulated, clipped, and checkpoints.

python examples/accelerate_loop.py OUT
"""

from __future__ import annotations

import sys

import torch
import words

import overspill
from overspill.integrations.accelerate import OffloadAccelerator  # in place of Accelerator

tokenizer, model = words.tokenizer(), words.model()
rows = tokenizer(list(words.lines()["text"]), padding="max_length", max_length=24, truncation=True)
ids = torch.tensor(rows["input_ids"])
loader = torch.utils.data.DataLoader(ids, batch_size=8, shuffle=True)

accelerator = OffloadAccelerator(gradient_accumulation_steps=2)
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = overspill.wrap(
    model, inner, device=accelerator.device, host_memory="24MiB", accumulate=2
)
model, prepared, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
    print(f"epoch {epoch + 1}  loss {loss.item():.4f}")
    accelerator.save_state(f"{sys.argv[1]}/checkpoint")
accelerator.load_state(f"{sys.argv[1]}/checkpoint")
optimizer.close()
