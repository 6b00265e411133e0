"""Lightning on several ranks, with its own strategies: the user's module calls ``wrap``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import overspill

from .spawned import RATES, loss_of, net, spawn
from .test_trainers import free_port, join

OPTIONS: dict[str, Any] = {"device": "sim", "host_memory": "1GiB", "rates": RATES}


class Training(lightning.LightningModule):
    def __init__(self, shards: bool, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.net, self.shards, self.options = net(), shards, options
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.shards:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.net.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = loss_of(self.net, number, self.global_rank)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        if self.options is None:
            return optimizer
        # Under DDP, the strategy's model is the one inside DistributedDataParallel.
        model: Any = self.net if self.shards else self.trainer.strategy.model
        return overspill.wrap(model, optimizer, **self.options)


def trained(
    size: int, shards: bool, options: dict[str, Any] | None, *, steps: int = 4,
    of: Path | None = None, to: Path | None = None,
) -> list[float]:  # fmt: skip
    """The losses of some steps; ``of`` and ``to``: Lightning's checkpoints."""
    strategy: Any = DDPStrategy()
    if shards:
        strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        strategy=strategy, devices=size, accelerator="cpu", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Training(shards, options)
    trainer.fit(module, torch.utils.data.DataLoader(range(16)), ckpt_path=of)  # type: ignore[arg-type]
    if to is not None:
        trainer.save_checkpoint(to)
    return module.losses


def both(rank: int, size: int, port: int, shards: bool, folder: Path) -> None:
    join(rank, size, port)
    os.environ.update(TORCHELASTIC_RUN_ID="1", GROUP_RANK="0")  # as torchrun does
    expected = trained(size, shards, None)
    options = {**OPTIONS, "device_memory": "100KiB"} if shards else OPTIONS
    assert len(expected) == 4
    losses = trained(size, shards, options)
    assert losses == pytest.approx(expected, rel=2e-6)
    first = trained(size, shards, options, steps=2, to=folder / "of two steps")
    assert first + trained(size, shards, options, of=folder / "of two steps") == losses


@pytest.mark.soak
@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_losses_are_lightning_s(shards: bool, tmp_path: Path) -> None:
    spawn(2, both, free_port(), shards, tmp_path)
