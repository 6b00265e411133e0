"""A loop of accelerate's with a wrapped model: its losses and its checkpoints, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

import overspill
from overspill.errors import OffloadError
from overspill.integrations import accelerate as streaming
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal
from tests.models import TinyLM, adamw, batch
from tests.parity.nets import PLACES, WIDTH, Net, adam

# Runs that are open at once do not divide what the disk has free, which other processes may take.
DISK = {"nvme_memory": "64MiB", "durable": False}
TIGHT = {"device": SIM, "device_memory": "700KiB", "host_memory": "1500KiB", **DISK}
OTHER = {"device": CPU, "host_memory": "1MiB", **DISK}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        return tuple(t[0] for t in batch(number, rows=1))


class Run:
    """Model, optimizer, schedule and loader of one accelerator."""

    def __init__(self, out: Path, options: dict[str, Any] | None = None, seed: int = 0) -> None:
        set_seed(seed)
        project = ProjectConfiguration(str(out), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(
            cpu=True, project_config=project, gradient_accumulation_steps=2
        )
        model = TinyLM()
        inner: torch.optim.Optimizer = adamw(model)
        placed = [True, True, True, True]
        if options is not None:
            (out / "store").mkdir(parents=True, exist_ok=True)
            inner = overspill.wrap(model, inner, nvme=out / "store", accumulate=2, **options)
            placed = [False, False, True, True]
        self.optimizer = inner
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        self.model, self.prepared, self.loader, self.schedule = self.accelerator.prepare(
            model, inner, loader, schedule, device_placement=placed
        )

    def train(self, skip: int = 0, count: int = 8) -> list[float]:
        losses = []
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for _, (x, y) in zip(range(count), loader, strict=False):
            with self.accelerator.accumulate(self.model):
                loss = self.model(x, y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.prepared.step()
                self.schedule.step()
                self.prepared.zero_grad()
            losses.append(loss.item())
        return losses


def near(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) > 3 and max(map(abs, map(float.__sub__, one, other))) < 2e-4


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From its own checkpoint in other memory, and from and to accelerate's own."""
    plain, ours = Run(tmp_path / "plain"), Run(tmp_path / "ours", TIGHT)
    assert near(plain.train(), ours.train())
    theirs = plain.accelerator.save_state()
    mine = streaming.save_state(ours.accelerator)
    assert {f.name for f in Path(mine).iterdir()} == {f.name for f in Path(theirs).iterdir()}
    after = ours.train(skip=8)

    again = Run(tmp_path / "ours", OTHER, seed=1)  # finds the last folder itself
    streaming.load_state(again.accelerator)
    assert again.train(skip=8) == after
    weights = ours.model.state_dict()
    assert all(torch.equal(t, weights[n]) for n, t in again.model.state_dict().items())

    back = Run(tmp_path / "back", seed=1)
    back.accelerator.load_state(mine)
    assert near(back.train(skip=8), after)
    there = Run(tmp_path / "there", OTHER, seed=1)
    streaming.load_state(there.accelerator, theirs)
    assert near(there.train(skip=8), plain.train(skip=8))
    for run in (ours, again, there):
        assert isinstance(run.optimizer, overspill.OffloadedOptimizer)
        run.optimizer.close()


def test_models_that_share_an_optimizer(tmp_path: Path) -> None:
    """The members of a list that is wrapped are prepared, saved and loaded one by one."""

    def build(seed: int, options: dict[str, Any] | None) -> tuple[Any, ...]:
        set_seed(seed)
        models = nn.ModuleList([TinyLM(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))])
        optimizer: torch.optim.Optimizer = adamw(models)
        if options is not None:
            store = tmp_path / f"store-{seed}"
            store.mkdir()
            optimizer = overspill.wrap(models, optimizer, nvme=store, **options)
        accelerator = Accelerator(cpu=True)
        placed = [False] * 3
        return accelerator, *accelerator.prepare(*models, optimizer, device_placement=placed)

    def train(made: tuple[Any, ...], first: int) -> list[float]:
        accelerator, language, other, optimizer = made
        losses = []
        for number in range(first, first + 4):
            loss = language(*batch(number)) + other(torch.ones(4, 8) * number).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, ours, again = build(0, None), build(0, TIGHT), build(1, OTHER)
    train(ours, 0)
    train(plain, 0)
    streaming.save_state(ours[0], str(tmp_path / "ours"))
    plain[0].save_state(str(tmp_path / "plain"))
    streaming.load_state(again[0], str(tmp_path / "ours"))
    back = build(2, None)
    back[0].load_state(str(tmp_path / "ours"))
    there = build(3, TIGHT)
    streaming.load_state(there[0], str(tmp_path / "plain"))
    after = train(ours, 4)
    assert train(again, 4) == after
    assert near(train(back, 4), after)
    assert near(train(there, 4), train(plain, 4))
    for made in (ours, again, there):
        made[3].optimizer.close()


class Adversaries:
    """A dict of two models under one accelerator, each with an optimizer and a schedule."""

    def __init__(self, seed: int, store: Path | None, options: dict[str, Any]) -> None:
        set_seed(seed)
        nets = {"generator": Net(seed), "discriminator": Net(seed + 1)}
        inner: list[Any] = [adam(net.parameters(), plain=store is None) for net in nets.values()]
        if store is not None:
            store.mkdir()
            inner = overspill.wrap(nets, inner, nvme=store, rates=overspill.Rates(), **options)
        self.accelerator = Accelerator(cpu=True)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in inner]
        made = self.accelerator.prepare(
            *nets.values(), *inner, *schedules, device_placement=[False] * 6
        )
        self.nets, self.optimizers, self.schedules = made[:2], made[2:4], made[4:]

    def train(self, first: int) -> list[torch.Tensor]:
        (generator, discriminator), losses = self.nets, []
        for number in range(first, first + 4):
            real, noise = normal(number, 6, WIDTH), normal(100 + number, 6, WIDTH)
            fake = generator(noise)
            self.optimizers[1].zero_grad()
            judged = nn.functional.softplus(-discriminator(real))
            judged = judged + nn.functional.softplus(discriminator(fake.detach()))
            self.accelerator.backward(judged.mean())
            self.optimizers[1].step()
            self.optimizers[0].zero_grad()
            fooled = nn.functional.softplus(-discriminator(fake)).mean()
            self.accelerator.backward(fooled)
            self.optimizers[0].step()
            for schedule in self.schedules:
                schedule.step()
            losses += [judged.detach(), fooled.detach()]
        return losses


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    plain = Adversaries(0, None, {})
    ours = Adversaries(0, tmp_path / "a", PLACES["device"])
    assert all(map(torch.equal, ours.train(0), plain.train(0)))
    streaming.save_state(ours.accelerator, str(tmp_path / "ours"))
    plain.accelerator.save_state(str(tmp_path / "plain"))
    names = [{f.name for f in (tmp_path / each).iterdir()} for each in ("ours", "plain")]
    assert names[0] == names[1] and "optimizer_1.bin" in names[0]
    expected = plain.train(4)
    assert all(map(torch.equal, ours.train(4), expected))
    for folder, store in (("ours", "b"), ("plain", "c")):
        again = Adversaries(5, tmp_path / store, PLACES["tight"])
        streaming.load_state(again.accelerator, str(tmp_path / folder))
        assert all(map(torch.equal, again.train(4), expected)), folder
        again.optimizers[0].optimizer.close()
    ours.optimizers[0].optimizer.close()
    back = Adversaries(7, None, {})
    back.accelerator.load_state(str(tmp_path / "ours"))
    assert all(map(torch.equal, back.train(4), expected))


def test_what_is_not_wrapped_is_left_to_accelerate(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for use in (streaming.save_state, streaming.load_state):
        with pytest.raises(OffloadError, match="wrap all that is"):
            use(run.accelerator, str(tmp_path))
    model = nn.Linear(4, 4)
    with overspill.wrap(
        model, torch.optim.SGD(model.parameters()), device="cpu", host_memory="1MiB"
    ):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, device_placement=[False])
        with pytest.raises(ValueError, match="safetensors"):
            streaming.save_state(accelerator, str(tmp_path), safe_serialization=False)
    for late in (False, True):  # not all were wrapped before prepare
        model = nn.Linear(4, 4)
        inner = torch.optim.SGD(model.parameters())
        accelerator = Accelerator(cpu=True)
        if late:
            accelerator.prepare(model, inner, device_placement=[False, False])
        with overspill.wrap(model, inner, device="cpu", host_memory="1MiB") as optimizer:
            if late:
                with pytest.raises(OffloadError, match="wrap all that is trained before"):
                    streaming.save_state(accelerator, str(tmp_path / "late"))
            else:
                accelerator.prepare(model, optimizer, device_placement=[False, False])
                streaming.save_state(accelerator, str(tmp_path / "early"))
                streaming.load_state(accelerator, str(tmp_path / "early"))


def test_a_number_that_is_taken(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", TIGHT)
    taken = streaming.save_state(run.accelerator)
    run.accelerator.project_configuration.iteration = 0
    with pytest.raises(ValueError, match=r"exists already; set .*iteration to a number that is"):
        streaming.save_state(run.accelerator)
    run.accelerator.project_configuration.iteration = 5
    assert Path(streaming.save_state(run.accelerator)).name == "checkpoint_5"
    assert Path(taken).name == "checkpoint_0"
    run.optimizer.close()


def test_a_folder_is_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", TIGHT)
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(ValueError, match="safetensors only; leave safe_serialization out"):
        streaming.save_state(run.accelerator, str(tmp_path / "kept"), safe_serialization=False)
    for number in (2, 4):
        run.train(count=number)
        folder = Path(streaming.save_state(run.accelerator, str(tmp_path / "kept")))
    run.optimizer.close()
    again = Run(tmp_path / "again", OTHER, seed=1)
    streaming.load_state(again.accelerator, str(folder))
    assert again.optimizer.state_dict()["state"][0]["step"] == 3
    assert not list(folder.glob("*.part"))
    again.optimizer.close()


def test_hooks_see_the_models_and_may_save_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "out", TIGHT)
    run.train()
    seen: list[tuple[int, ...]] = []

    def save(models: Any, states: Any, folder: str) -> None:
        seen.append((len(models), len(states)))
        while states:
            states.pop()
            torch.save(models[-1].state_dict(), Path(folder) / "mine.pt")

    def load(models: Any, folder: str) -> None:
        seen.append((len(models),))
        while models:
            models.pop().load_state_dict(torch.load(Path(folder) / "mine.pt"))

    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    folder = Path(streaming.save_state(run.accelerator))
    assert seen == [(1, 1)] and not list(folder.glob("*.safetensors"))
    before = {n: t.clone() for n, t in run.model.state_dict().items()}
    run.train(count=2)
    streaming.load_state(run.accelerator, str(folder))
    assert seen[1:] == [(1,)]
    assert all(torch.equal(t, before[n]) for n, t in run.model.state_dict().items())
    run.optimizer.close()


class Counting(TinyLM):
    """With state of its own, a tensor."""

    count = 0.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = float(state)


def test_a_modules_own_state_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Run.__init__.__globals__, "TinyLM", Counting)
    run = Run(tmp_path / "out", TIGHT)
    run.model.count = 7.0
    run.train(count=2)
    folder = streaming.save_state(run.accelerator)
    run.model.count = 1.0
    streaming.load_state(run.accelerator, folder)
    assert run.model.count == 7.0
    run.optimizer.close()
    plain = Run(tmp_path / "plain")
    plain.accelerator.load_state(folder)
    assert plain.model.count == 7.0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight


@about_cpu
def test_a_compiled_model_stays_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seed(0)
    accelerator = streaming.OffloadAccelerator(cpu=True)
    model = TinyLM()
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **OTHER)
    compiled: Any = torch.compile(model, backend="eager")
    moves = []
    monkeypatch.setattr(type(compiled), "to", lambda *given: moves.append(given), raising=False)
    made, prepared = accelerator.prepare(compiled, optimizer)
    assert made is compiled and not moves
    accelerator.backward(made(*batch(0)))
    prepared.step()
    prepared.zero_grad()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    streamed, save = [], streaming._save_state
    monkeypatch.setattr(streaming, "_save_state", lambda *a: streamed.append(a) or save(*a))
    accelerator.save_state(str(tmp_path / "saved"))
    assert len(streamed) == 1
    accelerator.backward(made(*batch(1)))
    prepared.step()
    accelerator.load_state(str(tmp_path / "saved"))
    assert all(torch.equal(v, expected[n]) for n, v in model.state_dict().items())
    optimizer.close()


def test_a_subclass_adds_its_own_files(tmp_path: Path) -> None:
    class Mine(Accelerator):
        def save_state(self, output_dir: Any = None, *given: Any, **more: Any) -> str:
            folder: str = super().save_state(output_dir, *given, **more)
            (Path(folder) / "random_states_9.pkl").write_bytes(b"mine")
            return folder

    model = TinyLM()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT) as optimizer:
        accelerator = Mine(cpu=True)
        accelerator.prepare(model, optimizer, device_placement=[False, False])
        streaming.save_state(accelerator, str(tmp_path / "saved"))
    assert (tmp_path / "saved/random_states_9.pkl").read_bytes() == b"mine"


def test_one_line_is_enough(tmp_path: Path) -> None:
    """``OffloadAccelerator`` places what is not wrapped, and streams checkpoints by itself."""
    set_seed(0)
    accelerator = streaming.OffloadAccelerator(cpu=True)
    accelerator.state.device = torch.device(DEVICE)
    model, encoder = TinyLM(), nn.Linear(4, 4)
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT)
    reads = optimizer.state_dict  # accelerate would read, move and load all of it
    optimizer.state_dict = None  # type: ignore[method-assign, assignment]
    moved, frozen, prepared = accelerator.prepare(model, encoder, optimizer)
    tied = Tied()
    accelerator.prepare(tied)
    optimizer.state_dict = reads  # type: ignore[method-assign]
    assert moved is model and frozen.weight.device.type == torch.device(DEVICE).type
    accelerator.backward(model(*(t.to(DEVICE) for t in batch(0))))
    prepared.step()
    prepared.zero_grad()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    kept, of_tied = encoder.weight.detach().clone(), tied.first.weight.detach().clone()
    accelerator.save_state(str(tmp_path / "saved"))
    with torch.no_grad():
        encoder.weight.zero_()
        tied.first.weight.zero_()
    accelerator.backward(model(*(t.to(DEVICE) for t in batch(1))))
    prepared.step()
    assert any(not torch.equal(v, expected[n]) for n, v in model.state_dict().items())
    accelerator.load_state(str(tmp_path / "saved"), None)
    assert all(torch.equal(v, expected[n]) for n, v in model.state_dict().items())
    assert torch.equal(tied.last.weight, of_tied) and tied.last.weight is tied.first.weight
    assert torch.equal(encoder.weight, kept), "models that are not wrapped are saved, too"
    optimizer.close()


def test_without_a_wrapped_model_it_is_accelerates_own(tmp_path: Path) -> None:
    accelerator = streaming.OffloadAccelerator(cpu=True)
    model = TinyLM()
    accelerator.prepare(model, adamw(model))
    accelerator.save_state(str(tmp_path / "saved"))
    assert (tmp_path / "saved/model.safetensors").is_file()
    accelerator.load_state(str(tmp_path / "saved"))
