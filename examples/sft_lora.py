"""TRL's SFT with a LoRA adapter over tiers of memory: a script of TRL's kind, but for two lines.

python examples/sft_lora.py OUT

The base here has random weights, over which an adapter learns little: the loss hardly falls.  With
a model of yours in place of ``words.model()`` it does.
"""

from __future__ import annotations

import sys

import torch
import words
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from overspill.integrations.transformers import offloaded

out = sys.argv[1]
trainer = offloaded(SFTTrainer)(
    words.model(),
    args=SFTConfig(
        out,
        max_steps=20,
        logging_steps=5,
        learning_rate=1e-2,
        report_to=[],
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=words.lines(),
    processing_class=words.tokenizer(),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    overspill={"host_memory": "16MiB"},
)  # fmt: skip
trainer.train()
trainer.save_model(f"{out}/adapter")  # as peft writes it
