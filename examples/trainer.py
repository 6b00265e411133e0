"""Hugging Face's Trainer over tiers of memory: a script of its own kind, but for two lines.

    python examples/trainer.py OUT [--steps 20]

Trains a small model from its config on the sources of Python's standard library, by bytes. For a
real one: ``AutoModelForCausalLM.from_pretrained(NAME, dtype="bfloat16")``, its tokenizer, your
data, and budgets that suit your machine (``overspill plan`` tells).
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from overspill.integrations.transformers import OverspillTrainer  # instead of Trainer


class Sources(torch.utils.data.Dataset):
    """Rows of bytes."""

    def __init__(self, length: int = 128) -> None:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py"))[:40])
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)[:-1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out")
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()

store = pathlib.Path(given.out) / "store"
store.mkdir(parents=True, exist_ok=True)
config = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=4, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
trainer = OverspillTrainer(
    LlamaForCausalLM(config),
    TrainingArguments(
        given.out, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_steps=given.steps, logging_steps=5, save_steps=10, learning_rate=1e-3, report_to=[],
    ),
    train_dataset=Sources(),
    overspill={"host_memory": "32MiB", "nvme": store, "durable": False},
)  # fmt: skip
trainer.train()  # resume_from_checkpoint=True goes on with the last checkpoint
trainer.save_model(f"{given.out}/model")  # as from_pretrained reads it
