"""A Lightning module, trained by Lightning's Trainer with one strategy more.

python examples/lightning_fit.py OUT
"""

from __future__ import annotations

import sys

import lightning
import torch
import words

from overspill.integrations.lightning import OverspillStrategy


class Writer(lightning.LightningModule):
    """Learns to go on with lines of code."""

    def __init__(self) -> None:
        super().__init__()
        self.model = words.model()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = words.tokenizer()(
    list(words.lines()["text"]), padding="max_length", max_length=24, truncation=True
)
loader = torch.utils.data.DataLoader(torch.tensor(rows["input_ids"]), batch_size=8, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=2, gradient_clip_val=1.0, accumulate_grad_batches=2, default_root_dir=sys.argv[1],
    logger=False, strategy=OverspillStrategy(host_memory="24MiB"),
)  # fmt: skip
trainer.fit(Writer(), loader)
print(f"loss {trainer.callback_metrics['loss']:.4f}")
