"""Lightning's Trainer over overspill: its losses and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

import overspill
from overspill.integrations.lightning import OverspillStrategy
from tests.devices import CPU, SIM, about_sim
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
        self.rate = 3e-3
        self.losses: dict[int, list[float]] = {}
        self.checked: list[float] = []

    def training_step(self, rows: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*rows)
        self.losses.setdefault(self.global_step, []).append(loss.item())
        return loss

    def validation_step(self, rows: Any, _: int) -> None:
        self.checked.append(self.model(*rows).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
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


def test_known_options_and_an_optimizer(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="host_memry"):
        OverspillStrategy(host_memry="1GiB")

    class Without(Module):
        def configure_optimizers(self) -> Any:
            return None

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
        default_root_dir=tmp_path, strategy=OverspillStrategy(**OTHER, nvme=tmp_path),
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="configure_optimizers returned none"):
        trainer.fit(Without(), torch.utils.data.DataLoader(Rows(4), batch_size=2))


class Adversaries(lightning.LightningModule):
    """A generator and a discriminator with an optimizer each, as Lightning's own example has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = (
            torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))) for _ in range(2)
        )
        self.automatic_optimization = False
        self.losses: list[float] = []

    def training_step(self, rows: torch.Tensor, _: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        fooled = torch.nn.functional.softplus(-self.discriminator(self.generator(rows))).mean()
        self.manual_backward(fooled)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = torch.nn.functional.softplus(-self.discriminator(rows)).mean()
        fake = self.generator(rows).detach()
        judged = judged + torch.nn.functional.softplus(self.discriminator(fake)).mean()
        self.manual_backward(judged)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses += [fooled.item(), judged.item()]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-2),
        ]


def adversaries(
    out: Path, steps: int, options: dict[str, Any] | None, resume: Path | None = None
) -> Adversaries:
    more: dict[str, Any] = {}
    if options is not None:
        (out / "store").mkdir(parents=True)
        more["strategy"] = OverspillStrategy(nvme=out / "store", **options)
    module, draw = Adversaries(), torch.Generator().manual_seed(1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=out, enable_checkpointing=False, **more,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.randn(24, 32, generator=draw), batch_size=4)
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(out / "last.ckpt")
    return module


@about_sim
def test_two_optimizers_and_manual_optimization(tmp_path: Path) -> None:
    """Losses are those of Lightning alone, and so is a run that goes on from a checkpoint."""
    tight = {**TIGHT, "device_memory": "60KiB"}
    plain = adversaries(tmp_path / "plain", 12, None)
    module = adversaries(tmp_path / "ours", 12, tight)
    assert len(module.losses) == len(plain.losses) == 12
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    overspill.unwrap(module)
    on = adversaries(tmp_path / "on", 24, tight, tmp_path / "ours/last.ckpt")
    theirs = adversaries(tmp_path / "theirs", 24, None, tmp_path / "plain/last.ckpt")
    assert on.losses == pytest.approx(theirs.losses, rel=1e-3)
    overspill.unwrap(on)


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


def trainer_of(strategy: Any, out: Path) -> Any:
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=out,
        num_sanity_val_steps=0, strategy=strategy,
    )  # fmt: skip


def refit(trainer: Any, module: Module, rate: float = 3e-3) -> None:
    """Four steps more."""
    module.rate = rate
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 4
    trainer.fit(module, torch.utils.data.DataLoader(Rows(8), batch_size=2))


@pytest.mark.parametrize("same", [True, False], ids=["the same trainer", "another"])
def test_a_fit_after_another_begins_with_what_it_was_given(same: bool, tmp_path: Path) -> None:
    """Its learning rate, its schedule, and moments of its own; its checkpoint says so."""
    found = []
    for name in ("own", "ours"):
        module, trainers = Module(), []
        for number in range(2):
            (tmp_path / f"{name}{number}").mkdir()
            ours = OverspillStrategy(nvme=tmp_path / f"{name}{number}", **TIGHT)
            strategy = "auto" if name == "own" else ours
            if not (same and trainers):
                trainers.append(trainer_of(strategy, tmp_path))
        refit(trainers[0], module)
        refit(trainers[-1], module, 1e-2)
        file = tmp_path / f"{name}.ckpt"
        trainers[-1].save_checkpoint(file)
        (state,) = torch.load(file, weights_only=True)["optimizer_states"]
        steps = {float(each["step"]) for each in state["state"].values()}
        assert steps == {4.0} and state["param_groups"][0]["lr"] == 5e-3
        found.append([loss for losses in module.losses.values() for loss in losses])
        if name == "ours":
            end(module)
    assert len(found[0]) == len(found[1]) == 8
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 2e-4


def test_a_strategy_trains_the_module_that_it_is_given(tmp_path: Path) -> None:
    """Even if another one has wrapped it; and each keeps its weights."""
    first, second = (
        trainer_of(OverspillStrategy(nvme=tmp_path, **TIGHT), tmp_path) for _ in range(2)
    )
    one, other = Module(), Module(1)
    refit(first, one)
    refit(second, other)
    kept, before = one.state_dict(), other.state_dict()
    refit(first, other)
    assert any(not torch.equal(t, before[n]) for n, t in other.state_dict().items())
    assert all(torch.equal(t, kept[n]) for n, t in one.state_dict().items())
    end(one, other)


def test_a_fit_with_another_kind_of_optimizer(tmp_path: Path) -> None:
    module, trainer = Module(), trainer_of(OverspillStrategy(nvme=tmp_path, **TIGHT), tmp_path)
    refit(trainer, module)
    module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        module.parameters(), lr=0.1
    )
    with pytest.raises(ValueError, match=r"overspill\.unwrap\(model\) before this fit"):
        refit(trainer, module)
    overspill.unwrap(module)
    refit(trainer, module)
    assert trainer.global_step == 8
    end(module)


class Telling(Module):
    """With state of its own, and a hook that looks at what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def get_extra_state(self) -> Any:
        return {"rows": 7}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"rows": 7}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        tensors = [v for v in checkpoint["state_dict"].values() if isinstance(v, torch.Tensor)]
        self.seen |= {v.half().dtype for v in tensors}


class PlaceholderParam(TorchCheckpointIO):
    """Somebody's own, which is to be asked."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved = checkpoint


def test_all_of_a_module_is_saved_by_whoever_saves(tmp_path: Path) -> None:
    module, writer = Telling(), PlaceholderParam()
    strategy = OverspillStrategy(nvme=tmp_path, **TIGHT)
    trainer = trainer_of(strategy, tmp_path)
    refit(trainer, module)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert module.seen == {torch.float16}
    read = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert read["_extra_state"] == {"rows": 7}
    strategy.checkpoint_io = writer
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert not (tmp_path / "two.ckpt").exists()
    assert writer.saved["state_dict"].keys() == read.keys()
    assert all(
        torch.equal(v, read[n])
        for n, v in writer.saved["state_dict"].items()
        if isinstance(v, torch.Tensor)
    )
    trainer.save_checkpoint("memory://overspill/three.ckpt")
    assert not Path("memory:").exists()
    end(module)
