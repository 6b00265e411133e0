"""Fine-tunes a Hugging Face model on several GPUs, sharded by FSDP2, in an ordinary loop.

torchrun --nproc-per-node 2 examples/two_gpus.py MODEL_FOLDER notes.txt /scratch/two [--out OUT]

The folder for NVMe is there and empty: a run is never begun over the store of another.
Without a GPU it runs on the CPU: with a tiny model it shows how it goes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import overspill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder with config, safetensors and tokenizer")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("nvme", type=Path, help="a folder on a fast disk")
    parser.add_argument("--host-memory", default="auto", help="of the machine, for all its ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="a folder to make")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already; give another --out")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank = dist.get_rank()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(args.text.read_text())["input_ids"])
    if len(tokens) <= args.seq:
        raise SystemExit(f"{args.text} has {len(tokens)} tokens; --seq needs more than {args.seq}")

    with overspill.empty_init():  # no memory for the weights: each rank reads its rows
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
    for block in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(block)
    fully_shard(model.train())
    optimizer = overspill.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=2e-5), weights=args.model,
        device=str(device), host_memory=args.host_memory, nvme=args.nvme, max_grad_norm=1.0,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(rank)  # every rank has other text
    with optimizer:
        for step in range(args.steps):
            start = int(torch.randint(len(tokens) - args.seq, (), generator=draw))
            batch = tokens[None, start : start + args.seq].to(device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1}  loss {loss.item() / dist.get_world_size():.4f}")
        optimizer.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
