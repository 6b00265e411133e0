"""Thirty steps with a framework's defaults, on every kind of device: its own losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import trl
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import overspill
from overspill.integrations.lightning import OverspillStrategy
from overspill.integrations.transformers import offloaded
from tests.devices import CPU, NAME, SIM
from tests.integrations.test_transformers import Rows, gpt2, llama
from tests.integrations.test_trl import PAIRS, TEXT, rows, words

STEPS = 30
PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "1MiB", "host_memory": "4MiB"},
}
if CPU == "cpu":
    PLACES["cpu"] = {"device": CPU, "host_memory": "1MiB"}
tokenizer = words
Run = Callable[[Any, Path, Any, "dict[str, Any] | None"], list[float]]


def trained(kind: type[Trainer], args: Any, model: Any, options: Any, **more: Any) -> list[float]:
    if options is not None:
        kind, more["overspill"] = offloaded(kind), options
    trainer: Any = kind(model, args=args, **more)
    trainer.train()
    if options is not None:
        trainer._offloaded.close()
    return [e["loss"] for e in trainer.state.log_history if "loss" in e]


def settings(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out), "max_steps": STEPS, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "bf16": False,
    }  # fmt: skip


def by_trainer(model: Any, out: Path, _: Any, options: Any) -> list[float]:
    return trained(Trainer, TrainingArguments(**settings(out)), model, options,
                   train_dataset=Rows())  # fmt: skip


def by_sft(model: Any, out: Path, words: Any, options: Any) -> list[float]:
    return trained(trl.SFTTrainer, trl.SFTConfig(**settings(out)), model, options,
                   train_dataset=rows(*TEXT), processing_class=words)  # fmt: skip


def by_dpo(model: Any, out: Path, words: Any, options: Any) -> list[float]:
    args = trl.DPOConfig(**settings(out), precompute_ref_log_probs=True)
    return trained(trl.DPOTrainer, args, model, options, train_dataset=rows(*PAIRS),
                   processing_class=words, ref_model=type(model)(model.config))  # fmt: skip


class Module(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, rows: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**rows).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def by_lightning(model: Any, out: Path, _: Any, options: Any) -> list[float]:
    module = Module(model)
    more = {} if options is None else {"strategy": OverspillStrategy(**options)}
    lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=out, **more,
    ).fit(module, DataLoader(Rows(), batch_size=4))  # fmt: skip
    if options is not None:
        overspill.unwrap(module)
    return module.losses


def in_loop(model: Any, options: Any, prepare: Any, backward: Any) -> list[float]:
    """``prepare`` gives a framework's model, optimizer and loader."""
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if options is not None:
        optimizer = overspill.wrap(model, optimizer, **options)
    ready, stepping, loader = prepare(model, optimizer, DataLoader(Rows(), batch_size=4))
    losses: list[float] = []
    for batch in itertools.islice(itertools.cycle(loader), STEPS):
        loss = ready(**batch).loss
        backward(loss)
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.item())
    if options is not None:
        optimizer.close()
    return losses


def by_accelerate(model: Any, out: Path, _: Any, options: Any) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True)

    def prepare(*parts: Any) -> Any:
        return accelerator.prepare(*parts, device_placement=[options is None] * 2 + [True])

    return in_loop(model, options, prepare, accelerator.backward)


def by_fabric(model: Any, out: Path, _: Any, options: Any) -> list[float]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def prepare(model: Any, optimizer: Any, loader: Any) -> Any:
        both = fabric.setup(model, optimizer, move_to_device=options is None)
        return *both, fabric.setup_dataloaders(loader)

    return in_loop(model, options, prepare, fabric.backward)


RUNS: dict[str, Run] = {
    "trainer": by_trainer, "sft": by_sft, "dpo": by_dpo, "lightning": by_lightning,
    "fabric": by_fabric, "accelerate": by_accelerate,
}  # fmt: skip
SHAPES = {"llama": llama, "gpt2": gpt2}


def cases() -> list[Any]:
    """Every day each framework once, on the test device two; all of them in the soak."""
    found = itertools.product(RUNS, SHAPES, PLACES)
    runs = ["trainer", "fabric"] if NAME else list(RUNS)
    daily = {
        (run, list(SHAPES)[n % 2], list(PLACES)[n // 2 % len(PLACES)]) for n, run in enumerate(runs)
    }
    return [pytest.param(*c, marks=() if c in daily else pytest.mark.soak) for c in found]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize(("run", "shape", "place"), cases())
def test_defaults(run: str, shape: str, place: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    options = {"nvme": tmp_path / "store", "rates": overspill.Rates(), **PLACES[place]}
    losses = []
    for given in (None, options):
        model = SHAPES[shape]()
        torch.manual_seed(1)
        losses.append(RUNS[run](model, tmp_path / "out", tokenizer, given))
    plain, ours = losses
    assert len(plain) == len(ours) == STEPS
    assert max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < 2e-4
