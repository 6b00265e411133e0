"""LoRA over a base whose files are quantised already, here to nf4 by bitsandbytes.

The base is read from its files and dequantised layer by layer.  At the end, the adapters are merged
into the dequantised base, which is saved as an ordinary model.

python examples/quantised_base.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import words
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import overspill

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
base = folder / "base-nf4"

# In place of a quantised model of the hub: a small one with random weights.
torch.manual_seed(0)
words.model().save_pretrained(folder / "base")
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
quantised = AutoModelForCausalLM.from_pretrained(
    folder / "base", quantization_config=nf4, device_map="cpu", dtype=torch.bfloat16
)
quantised.save_pretrained(base)
del quantised

config = AutoConfig.from_pretrained(base)
with overspill.empty_init():
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
optimizer = overspill.wrap(
    model,
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3),
    weights=base,
    device="sim",
    device_memory="2MiB",
    host_memory="32MiB",
)
print(optimizer.plan)

rows = words.tokenizer()(words.sources(2)[:8], padding=True, return_tensors="pt")["input_ids"]
for step in range(20):
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}  loss {loss.item():.4f}")

with overspill.materialized(model):
    model.merge_and_unload().save_pretrained(folder / "merged")
optimizer.close()
merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.bfloat16)
with torch.no_grad():
    print(f"merged  loss {merged(input_ids=rows, labels=rows).loss.item():.4f}")
