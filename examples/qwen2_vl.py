"""A vision-language model in Hugging Face's Trainer, the tower for pictures and the text trained.

The model is tiny and random.  Pictures are plain colours and the text names them, so that it
learns within seconds.  With a real one, use Qwen2VLForConditionalGeneration.from_pretrained and its
processor.

python examples/qwen2_vl.py OUT
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, TrainingArguments

from overspill.integrations.transformers import OverspillTrainer

IMAGE, START, END, ASK, COLOURS, PATCH = 60, 61, 62, 3, 3, 8


class Colours(torch.utils.data.Dataset):
    """A picture of 16 patches, which become 4 tokens, and what colour it has."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        colour = number % COLOURS
        picture = 0.1 * torch.randn(16, 3, 2, PATCH, PATCH)
        picture[:, colour] += 1.0
        ids = torch.tensor([START, *[IMAGE] * 4, END, ASK, 10 + colour])
        labels = torch.full_like(ids, -100)
        labels[-1] = ids[-1]
        return {
            "input_ids": ids, "labels": labels, "pixel_values": picture.flatten(1),
            "image_grid_thw": torch.tensor([1, 4, 4]), "mm_token_type_ids": (ids == IMAGE).long(),
        }  # fmt: skip


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)  # patches of all pictures
    return batch


torch.manual_seed(0)
model = Qwen2VLForConditionalGeneration(
    Qwen2VLConfig(
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END,
        video_token_id=63,
        text_config={
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1,
            "eos_token_id": 2, "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": PATCH,
            "mlp_ratio": 2,
        },
    )
)  # fmt: skip
trainer = OverspillTrainer(
    model,
    TrainingArguments(
        sys.argv[1], max_steps=30, logging_steps=10, learning_rate=2e-3, report_to=[],
        per_device_train_batch_size=8, save_strategy="no", remove_unused_columns=False,
    ),
    train_dataset=Colours(),
    data_collator=collate,
    overspill={"host_memory": "12MiB"},
)  # fmt: skip
trainer.train()
