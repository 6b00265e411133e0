"""Inference with a model that does not fit: weights stay in their files and come as they are used.

    python examples/generate.py OUT [--tokens 8]

Writes a small Llama with random weights as ``from_pretrained`` reads it, then generates from that
folder under a budget that is less than its weights.  For a real one: the folder of your model in
place of OUT/model, and budgets that suit your machine; ``frozen="nf4"`` moves a quarter.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overspill

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out")
parser.add_argument("--tokens", type=int, default=8)
given = parser.parse_args()

folder = pathlib.Path(given.out) / "model"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained(folder)
prompt = torch.tensor([[1, 2, 3, 4]])
plain = LlamaForCausalLM.from_pretrained(folder).eval()
expected = plain.generate(prompt, max_new_tokens=given.tokens, do_sample=False)

with overspill.empty_init():  # no memory for the weights
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
with overspill.wrap(model, weights=folder, host_memory="12MiB") as offloaded:
    made = model.generate(prompt, max_new_tokens=given.tokens, do_sample=False)
    print(f"{offloaded.stats.tokens_s:.1f} tokens/s, {offloaded.stats.explain()}")
print(made.tolist())
same = torch.equal(made, expected)
print("the very tokens of the model in memory" if same else "the tokens DIFFER")
raise SystemExit(not same)
