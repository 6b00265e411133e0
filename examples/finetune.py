"""Fine-tunes a Hugging Face model in an ordinary PyTorch loop, with its state on three tiers.

python examples/finetune.py MODEL_FOLDER notes.txt /scratch/one [--out finetuned]

The folder for NVMe is there and empty: a run is never begun over the store of another.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import overspill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder with config, safetensors and tokenizer")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("nvme", type=Path, help="a folder on a fast disk")
    parser.add_argument("--device", default=None, help="cuda, cpu or sim; default: what is there")
    parser.add_argument("--host-memory", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="a folder to make")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already; give another --out")

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(args.text.read_text())["input_ids"])
    if len(tokens) <= args.seq:
        raise SystemExit(f"{args.text} has {len(tokens)} tokens; --seq needs more than {args.seq}")

    with overspill.empty_init():  # no memory for the weights: they go straight to their tiers
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    model.config.use_cache = False  # layers that are called with a cache cannot be recomputed
    optimizer = overspill.wrap(
        model.train(),
        torch.optim.AdamW(model.parameters(), lr=2e-5),
        weights=args.model,
        precision="bf16",
        device=args.device,
        host_memory=args.host_memory,
        nvme=args.nvme,
        max_grad_norm=1.0,
    )
    print(optimizer.plan)
    device = next(model.parameters()).device
    with optimizer:
        for step in range(args.steps):
            start = torch.randint(len(tokens) - args.seq, ()).item()
            batch = tokens[None, start : start + args.seq].to(device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}  loss {loss.item():.4f}  {optimizer.stats.step_s:.2f} s")
        optimizer.trace("trace.json")
        optimizer.save(args.out)  # part by part: the device need not have room for the whole model


if __name__ == "__main__":
    main()
