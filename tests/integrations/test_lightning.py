"""Lightning's Trainer over overspill: its losses and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import overspill
from overspill.integrations.lightning import OverspillStrategy
from tests.devices import CPU, SIM
from tests.models import TinyLM, batch

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]
TIGHT = {"device": SIM, "device_memory": "700KiB", "host_memory": "1500KiB", "durable": False}
OTHER = {"device": CPU, "host_memory": "1MiB", "durable": False}
STEPS, SAVED = 12, 8


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        return tuple(t[0] for t in batch(number, rows=1))


class Module(lightning.LightningModule):
    """A language model, with the losses that it has had by step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = TinyLM(tied=True)
        self.save_hyperparameters()
        self.losses: dict[int, list[float]] = {}
        self.checked: list[float] = []

    def training_step(self, rows: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*rows)
        self.losses.setdefault(self.global_step, []).append(loss.item())
        return loss

    def validation_step(self, rows: Any, _: int) -> None:
        self.checked.append(self.model(*rows).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    out: Path, options: dict[str, Any] | None = None, resume: Path | None = None, seed: int = 0
) -> Module:
    module = Module(seed)
    more: dict[str, Any] = {}
    if options is not None:
        store = out / "store"
        store.mkdir(parents=True)
        more["strategy"] = OverspillStrategy(nvme=store, **options)
    keep = ModelCheckpoint(out / "kept", "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, accumulate_grad_batches=2, callbacks=[keep],
        gradient_clip_val=1.0, logger=False, enable_progress_bar=False, val_check_interval=8,
        enable_model_summary=False, default_root_dir=out, num_sanity_val_steps=1, **more,
    )  # fmt: skip
    # Four steps an epoch: within one, Lightning begins its data anew when it resumes.
    data = [torch.utils.data.DataLoader(Rows(n), batch_size=2) for n in (16, 4)]
    trainer.fit(module, *data, ckpt_path=None if resume is None else str(resume))
    return module


def far(one: dict[int, list[float]], other: dict[int, list[float]]) -> float:
    assert one.keys() == other.keys() and len(one) >= STEPS - SAVED
    return max(abs(a - b) for n in one for a, b in zip(one[n], other[n], strict=True))


def after(module: Module) -> dict[int, list[float]]:
    return {step: losses for step, losses in module.losses.items() if step >= SAVED}


def end(*modules: Module) -> None:
    for module in modules:
        overspill.unwrap(module)


def kept(out: Path) -> Path:
    return out / "kept" / f"step={SAVED}.ckpt"


def test_a_fit_and_its_checkpoints(tmp_path: Path) -> None:
    """Resumed in other memory the bits are the same; the plain trainer reads ours, and the other
    way round."""
    plain, ours = fit(tmp_path / "plain"), fit(tmp_path / "ours", TIGHT)
    assert far(plain.losses, ours.losses) < 2e-4
    assert len(plain.checked) == len(ours.checked) > 3
    assert max(abs(a - b) for a, b in zip(plain.checked, ours.checked, strict=True)) < 2e-4

    again = fit(tmp_path / "again", OTHER, kept(tmp_path / "ours"), seed=1)
    assert after(again) == again.losses == after(ours)
    weights = ours.state_dict()
    assert all(torch.equal(t.cpu(), weights[n].cpu()) for n, t in again.state_dict().items())

    back = fit(tmp_path / "back", None, kept(tmp_path / "ours"), seed=1)
    assert far(back.losses, after(ours)) < 2e-4
    there = fit(tmp_path / "there", OTHER, kept(tmp_path / "plain"), seed=1)
    assert far(there.losses, after(plain)) < 2e-4
    loaded = Module.load_from_checkpoint(kept(tmp_path / "ours"), seed=1)
    assert loaded.state_dict().keys() == weights.keys()
    end(ours, again, there)


def test_one_optimizer_and_known_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="host_memry"):
        OverspillStrategy(host_memry="1GiB")

    class Two(Module):
        def configure_optimizers(self) -> Any:
            parameters = list(self.parameters())
            return [torch.optim.SGD(parameters[:2]), torch.optim.SGD(parameters[2:])]

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
        default_root_dir=tmp_path, strategy=OverspillStrategy(**OTHER, nvme=tmp_path),
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    module = Two()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="one optimizer"):
        trainer.fit(module, torch.utils.data.DataLoader(Rows(4), batch_size=2))


def test_what_is_only_validated_stays_as_it_is(tmp_path: Path) -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        strategy=OverspillStrategy(**OTHER, nvme=tmp_path), enable_model_summary=False,
    )  # fmt: skip
    trainer.validate(module, torch.utils.data.DataLoader(Rows(4), batch_size=2), verbose=False)
    assert len(module.checked) == 2
    with pytest.raises(overspill.OffloadError, match="not wrapped"):
        overspill.unwrap(module)


def test_a_loop_of_fabric(tmp_path: Path) -> None:
    """Wrapped first, set up after; clipping and accumulation are Fabric's."""
    losses = []
    for wrapped in (False, True):
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        torch.manual_seed(0)
        model = TinyLM()
        inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if wrapped:
            inner = overspill.wrap(model, inner, nvme=tmp_path, **TIGHT)
        ready, optimizer = fabric.setup(model, inner, move_to_device=not wrapped)
        losses.append([])
        for number in range(8):
            with fabric.no_backward_sync(ready, enabled=number % 2 == 0):
                loss = ready(*batch(number))
                fabric.backward(loss)
            if number % 2:
                fabric.clip_gradients(ready, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item())
        if wrapped:
            overspill.unwrap(model)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 2e-4
