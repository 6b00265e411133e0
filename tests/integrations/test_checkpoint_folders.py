"""Checkpoints as folders: complete or not there, and the newest complete one is taken."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from overspill.integrations import transformers as ours
from overspill.integrations.accelerate import load_state, save_state
from overspill.integrations.checkpoints import newest_complete, problem_of
from overspill.integrations.transformers import OverspillTrainer, offloaded
from tests.devices import about_cpu
from tests.integrations.test_accelerate import OTHER, Run
from tests.integrations.test_transformers import (
    PLACES,
    Rows,
    arguments,
    closes,
    llama,
    logged,
    same_weights,
)

__all__ = ["closes"]
pytestmark = about_cpu
STATE = "trainer_state.json"


def made(out: Path, kind: Any = OverspillTrainer, *, seed: int = 0, **more: Any) -> Any:
    options: dict[str, Any] = {"overspill": PLACES["memory"]} if kind is not Trainer else {}
    return kind(
        llama(seed), arguments(out, **more), train_dataset=Rows(), eval_dataset=Rows(8), **options
    )


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


# What a process that was killed leaves of the checkpoint that it wrote in place.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "trainer_state.json is missing": lambda folder: (folder / STATE).unlink(),
    "trainer_state.json is not complete JSON": lambda folder: cut(folder / STATE),
    "optimizer.pt is cut off": lambda folder: cut(folder / "optimizer.pt"),
    "scheduler.pt is empty": lambda folder: (folder / "scheduler.pt").write_bytes(b""),
    "rng_state.pth is cut off": lambda folder: cut(folder / "rng_state.pth"),
    "model.safetensors has": lambda folder: cut(folder / "model.safetensors"),
    "model.safetensors is not a complete": lambda folder: cut(folder / "model.safetensors", 5),
    "which is missing": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    ),
}


# More of the same, and what others write.
ODD: dict[str, Callable[[Path], object]] = {
    "optimizer.pt begins with zeros": lambda folder: (folder / "optimizer.pt").write_bytes(
        bytes((folder / "optimizer.pt").stat().st_size)
    ),
    "scheduler.pt is cut off": lambda folder: (folder / "scheduler.pt").write_bytes(b"P"),
    "scheduler.pt is a link to a file that is missing": lambda folder: (
        (folder / "scheduler.pt").unlink(),
        (folder / "scheduler.pt").symlink_to("none"),
    ),
    "index.json does not list shards": lambda folder: (
        folder / "model.safetensors.index.json"
    ).write_text('{"weight_map": {"a": [1]}}'),
    "config.json is nested too deeply": lambda folder: (folder / "config.json").write_text(
        "[" * 100_000
    ),
    "safetensors is nested too deeply": lambda folder: (folder / "a.safetensors").write_bytes(
        (100_000).to_bytes(8, "little") + b"[" * 100_000
    ),
    "safetensors is not a complete": lambda folder: (folder / "a.safetensors").write_bytes(
        (36).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, null]}}  '
    ),
    "b.safetensors is not a complete": lambda folder: (folder / "b.safetensors").write_bytes(
        (36).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 1e999]}} '
    ),
    "": lambda folder: (
        (folder / "predictions.json").write_text('{"a": 1}\n{"a": 2}\n'),
        (folder / "config.json").write_text("\ufeff{}"),
        (folder / "tokens.bin").write_bytes(b"\0\0\0\1"),
        os.mkfifo(folder / "model.pipe.json"),
        (folder / "again").symlink_to(folder),
    ),
}


def cut(path: Path, left: int | None = None) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if left is None else left])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended, with its checkpoints 4, 8 and 12."""
    out: Path = tmp_path_factory.mktemp("trainer") / "run"
    trainer = made(out)
    trainer.train()
    torch.save(trainer.model.state_dict(), out.parent / "weights.pt")
    (out.parent / "logged.json").write_text(json.dumps(logged(trainer, 8)))
    trainer._offloaded.close()
    return out


@pytest.mark.parametrize("what", ODD)
def test_odd_files(run: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(run / "checkpoint-12", tmp_path / "checkpoint-12")
    ODD[what](tmp_path / "checkpoint-12")
    problem = problem_of(tmp_path / "checkpoint-12", [STATE])
    assert problem is None if not what else what in str(problem)


def test_two_checkpoints_of_one_number(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-010"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-10" / STATE).write_text("{}")
    assert newest_complete(tmp_path, "checkpoint-", [STATE]) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("what", DAMAGE)
def test_the_newest_complete_checkpoint_is_taken(
    run: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says which were skipped, and why; the run ends as one that nobody killed."""
    shutil.copytree(run, tmp_path / "run")
    DAMAGE[what](tmp_path / "run" / "checkpoint-12")
    trainer = made(tmp_path / "run", seed=1)
    with caplog.at_level(logging.INFO, "overspill"):
        trainer.train(resume_from_checkpoint=True)
    skipped = [r.message for r in caplog.records if "skipped an incomplete" in r.message]
    assert len(skipped) == 1 and "checkpoint-12" in skipped[0] and what in skipped[0]
    assert any(r.message.endswith("checkpoint is " + str(tmp_path / "run" / "checkpoint-8"))
               for r in caplog.records)  # fmt: skip
    assert [list(each) for each in logged(trainer, 8)] == json.loads(
        (run.parent / "logged.json").read_text()
    )
    expected = torch.load(run.parent / "weights.pt")
    assert all(torch.equal(t, expected[n]) for n, t in trainer.model.state_dict().items())


def test_without_a_complete_checkpoint_nothing_is_trained(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        (tmp_path / "empty").mkdir()
        made(tmp_path / "empty").train(resume_from_checkpoint=True)
    shutil.copytree(run, tmp_path / "run")
    for number in (4, 8, 12):
        cut(tmp_path / "run" / f"checkpoint-{number}" / "optimizer.pt")
    trainer = made(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete: .*checkpoint-12.*-8"):
        trainer.train(resume_from_checkpoint=True)
    named = tmp_path / "run" / "checkpoint-8"
    with pytest.raises(ValueError, match=r"incomplete: .*optimizer.pt is cut off; name another"):
        trainer.train(resume_from_checkpoint=str(named))
    assert trainer._offloaded is None, "nothing was wrapped or loaded"
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-8"))  # the path of another one
    assert trainer.state.global_step == 12


def test_a_plain_trainers_checkpoints_are_complete(run: Path, tmp_path: Path) -> None:
    trainer = made(tmp_path / "plain", Trainer, max_steps=4)
    trainer.train()
    assert problem_of(tmp_path / "plain" / "checkpoint-4", (STATE,)) is None
    assert newest_complete(tmp_path / "plain", "checkpoint-", (STATE,)) is not None
    assert problem_of(run / "checkpoint-12", (STATE,)) is None
    assert newest_complete(tmp_path / "none", "checkpoint-") is None


# -- what the framework does with folders ----------------------------------------------------------


def test_the_best_model_and_the_limit(tmp_path: Path) -> None:
    """A draft's place is nowhere to be found, and old checkpoints go when the new one is there."""
    more = {
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2,
        "learning_rate": 0.05, "save_steps": 2, "eval_steps": 2,
    }  # fmt: skip
    theirs = made(tmp_path / "theirs", Trainer, **more)
    mine = made(tmp_path / "mine", **more)
    for trainer in (theirs, mine):
        trainer.train()
    assert names(tmp_path / "mine") == names(tmp_path / "theirs")
    best = Path(mine.state.best_model_checkpoint)
    assert best.parent == tmp_path / "mine" and best.is_dir()
    assert best.name == Path(theirs.state.best_model_checkpoint).name
    for folder in (tmp_path / "mine").glob("checkpoint-*"):
        assert ".part" not in (folder / STATE).read_text()
        other = json.loads((tmp_path / "theirs" / folder.name / STATE).read_text())
        told = json.loads((folder / STATE).read_text())["best_model_checkpoint"]
        assert Path(told).name == Path(other["best_model_checkpoint"]).name


class Adding(Trainer):
    """As people write them: adds a file of its own to each checkpoint, after or before."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        (folder / "mine.txt").write_text("mine")

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / "beside.txt").write_text("beside")


class Noting(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(names(Path(args.output_dir) / f"checkpoint-{state.global_step}"))


def test_trainers_and_callbacks_that_add_files(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", offloaded(Adding))
    noting = Noting()
    trainer.add_callback(noting)
    trainer.train()
    assert len(noting.seen) == 3
    assert all({"mine.txt", "beside.txt", STATE, "optimizer.pt"} <= seen for seen in noting.seen)
    trainer.save_model()
    assert (tmp_path / "run" / "beside.txt").read_text() == "beside"


def test_a_checkpoint_is_written_over_with_what_others_put_there(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", max_steps=4)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-4"
    (folder / "notes.txt").write_text("mine")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"of a run before")
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.zero_()
    trainer._save_checkpoint(trainer.model, None)
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "model-00001-of-00002.safetensors").exists()
    assert (folder / "model.safetensors").read_bytes() != before
    assert not list(tmp_path.rglob("*.part"))


def test_a_push_takes_the_folder_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path / "run", max_steps=4)
    pushed: list[tuple[str, set[str]]] = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint",
        lambda self, folder: pushed.append((folder, names(Path(folder)))),
    )  # fmt: skip
    trainer.args.push_to_hub = True
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
    trainer.train()
    ((folder, there),) = pushed
    assert Path(folder) == tmp_path / "run" / "checkpoint-4" and STATE in there


def test_what_killed_trainers_left_goes(tmp_path: Path) -> None:
    """Of any step: the next run may save at others."""
    left = tmp_path / "run" / f".checkpoint-3.{'0' * 32}.part"
    (left / "checkpoint-3").mkdir(parents=True)
    (left / "checkpoint-2").mkdir()
    made(tmp_path / "run", max_steps=4).train()
    assert not left.exists() and "checkpoint-4" in names(tmp_path / "run")


def test_an_interrupted_save_leaves_the_checkpoint_before(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    trainer = made(tmp_path / "run", seed=1)
    trainer.create_optimizer()
    trainer.state.global_step = 12

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours, "write_torch", interrupt)
    before = {f.name: f.read_bytes() for f in (run / "checkpoint-12").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        trainer._save_checkpoint(trainer.model, None)
    folder = tmp_path / "run" / "checkpoint-12"
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert trainer._get_output_dir(None) == str(tmp_path / "run")
    monkeypatch.undo()
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    trainer._save_checkpoint(trainer.model, None)
    again = made(tmp_path / "run", seed=2)
    again._load_from_checkpoint(str(folder))
    assert same_weights(again.model, trainer.model)


# -- accelerate -----------------------------------------------------------------------------------


def test_the_newest_complete_state_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Run(tmp_path / "run", OTHER)
    first.train(count=2)
    save_state(first.accelerator)
    first.train(count=2)
    torn = Path(save_state(first.accelerator))
    cut(torn / "optimizer.bin")
    again = Run(tmp_path / "run", OTHER, seed=1)
    load_state(again.accelerator)
    assert again.optimizer.state_dict()["state"][0]["step"] == 1
    assert f"skipped an incomplete checkpoint: {torn / 'optimizer.bin'} is cut off" in caplog.text
    cut(tmp_path / "run" / "checkpoints" / "checkpoint_0" / "model.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete"):
        load_state(again.accelerator)
    for run in (first, again):
        run.optimizer.close()


def test_folders_beyond_the_limit_go_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails has not cost an older one, nor a number."""
    run = Run(tmp_path / "run", OTHER)
    run.train(count=2)
    run.accelerator.project_configuration.total_limit = 2
    folder = tmp_path / "run" / "checkpoints"
    for number in range(3):
        assert Path(save_state(run.accelerator)) == folder / f"checkpoint_{number}"
    assert names(folder) == {"checkpoint_1", "checkpoint_2"}

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("overspill.integrations.accelerate.write_torch", fail)
        with pytest.raises(Exception, match=r"checkpoint_3.*: cannot write: No space left"):
            save_state(run.accelerator)
    assert names(folder) == {"checkpoint_1", "checkpoint_2"}
    assert names(tmp_path / "run") == {"checkpoints", "store"}
    assert Path(save_state(run.accelerator)) == folder / "checkpoint_3"
    (folder / "checkpoint_4").mkdir()
    with pytest.raises(ValueError, match="checkpoint_4 exists already; set"):
        save_state(run.accelerator)
    run.accelerator.project_configuration.iteration = 5
    assert Path(save_state(run.accelerator)) == folder / "checkpoint_5"
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(ValueError, match="save_state needs output_dir"):
        save_state(run.accelerator)
    run.optimizer.close()
