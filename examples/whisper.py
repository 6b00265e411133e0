"""Speech to text: Whisper in Hugging Face's Seq2SeqTrainer, evaluated by the text that it writes.

python examples/whisper.py OUT

With so few steps from random weights it only begins to learn: what it hears is about chance.
"""

from __future__ import annotations

import sys

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from overspill.integrations.transformers import offloaded

TONES, LENGTH = 8, 6


class Tones(torch.utils.data.Dataset):
    """Spectra of a few tones, one after another, and their numbers."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tones = torch.randint(0, TONES, (LENGTH,), generator=torch.Generator().manual_seed(number))
        spectrum = torch.zeros(16, 60)
        for place, tone in enumerate(tones):
            spectrum[2 * tone, 10 * place : 10 * place + 10] = 1.0
        return {"input_features": spectrum, "labels": tones + 3}


def right(predictions: tuple) -> dict[str, float]:
    """The share of tones that were heard."""
    written, tones = predictions
    return {"heard": float((written[:, 1 : LENGTH + 1] == tones[:, :LENGTH]).mean())}


out = sys.argv[1]
model = WhisperForConditionalGeneration(
    WhisperConfig(
        vocab_size=16, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_source_positions=30, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[],
        begin_suppress_tokens=[],
    )
)  # fmt: skip
model.generation_config.max_length = LENGTH + 2
trainer = offloaded(Seq2SeqTrainer)(
    model,
    Seq2SeqTrainingArguments(
        out, max_steps=60, logging_steps=20, learning_rate=1e-3, per_device_train_batch_size=16,
        predict_with_generate=True, eval_strategy="steps", eval_steps=30, report_to=[],
    ),
    train_dataset=Tones(),
    eval_dataset=[Tones()[number] for number in range(1000, 1032)],
    compute_metrics=right,
    overspill={"host_memory": "8MiB"},
)  # fmt: skip
trainer.train()
print(trainer.evaluate())
