"""TRL's DPO over tiers of memory; the reference model shares the budgets.

python examples/dpo.py OUT
"""

from __future__ import annotations

import copy
import sys

import torch
import words
from trl import DPOConfig, DPOTrainer

from overspill.integrations.transformers import offloaded

out, policy = sys.argv[1], words.model()
trainer = offloaded(DPOTrainer)(
    policy,
    ref_model=copy.deepcopy(policy),
    args=DPOConfig(
        out, max_steps=20, logging_steps=5, learning_rate=1e-3,
        per_device_train_batch_size=4, report_to=[], bf16=torch.cuda.is_available(),
    ),
    train_dataset=words.pairs(),
    processing_class=words.tokenizer(),
    overspill={"host_memory": "24MiB"},
)  # fmt: skip
trainer.train()
trainer.save_model(f"{out}/model")
