"""The files of a run: what is checked before it begins, and what is there when something fails."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.durable.export import export_store
from overspill.errors import OffloadError
from overspill.io_engine import atomic_files
from overspill.train import job as jobs
from overspill.train import outputs
from overspill.train.job import Job, run
from tests.unit.test_cli import call
from tests.unit.test_cli import small as command
from tests.unit.test_train_job import FILES, Quiet, small
from tests.unit.test_train_job_resume import interrupted

safetensors_torch = pytest.importorskip("safetensors.torch")
PICTURES = {"loss.png", "timeline.png", "memory.png"}


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def stored(job: Job) -> list[Path]:
    return [each for each in Path(job.offload["nvme"]).iterdir() if each.is_file()]


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_a_run_without_matplotlib_lacks_pictures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it says so before the first step."""
    without_matplotlib(monkeypatch)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "loss.png").write_text("of a run before")
    watch = Quiet()
    report = run(small(tmp_path), watch)
    assert report is not None and len(report.records) == 4
    assert names(tmp_path / "out") == FILES - PICTURES
    notes = [note for note in watch.notes if "no pictures will be drawn" in note]
    assert len(notes) == 1 and 'pip install "overspill[plot]"' in notes[0]


def test_the_command_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    result = call(*command(tmp_path))
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'out' / 'model.safetensors'}" in result.output
    assert "loss.png" not in result.output.split("wrote", 1)[1]


@pytest.mark.parametrize(
    ("module", "name", "there"),
    [
        (outputs, "draw_memory", FILES - {"memory.png"}),
        (outputs.pictures, "draw_loss", FILES - PICTURES),
        (jobs, "write_page", FILES - PICTURES - {"report.html"}),
        (jobs, "after_a_run", {"model.safetensors", "config.json", "trace.json", "planned.json"}),
        (outputs, "replay", {"model.safetensors", "config.json", "trace.json"}),
    ],
)
def test_what_fails_late_costs_nothing_that_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, there: set[str]
) -> None:
    """The model is written first; what only shows the run, last."""

    def fail(*_: Any, **__: Any) -> None:
        raise OffloadError("made up")

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(OffloadError, match="made up"):
        run(small(tmp_path), Quiet())
    assert names(tmp_path / "out") == there
    assert safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")


def test_a_comparison_that_does_not_fit_costs_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs all the memory that the run itself did without."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(jobs, "load_in_memory", full)
    with pytest.raises(torch.OutOfMemoryError):
        run(small(tmp_path, compare=True), Quiet())
    figures = json.loads((tmp_path / "out" / "run.json").read_text())
    assert len(figures["steps"]) == 4 and figures["comparison"] is None
    assert names(tmp_path / "out") >= {"model.safetensors", "trace.json", "run.json"}


# -- where files go -------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_out_that_is_a_file_is_refused_before_anything_is_made(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    job = small(tmp_path, out=tmp_path / "file" / below)
    with pytest.raises(ValueError, match=f"out: {tmp_path / 'file'} is not a folder; name another"):
        run(job, Quiet())
    result = call(*command(tmp_path, "--out", tmp_path / "file" / below))
    assert result.exit_code == 2 and "is not a folder" in result.output
    assert (tmp_path / "file").read_text() == "mine" and not stored(job)


def test_out_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    job = small(tmp_path)
    with pytest.raises(ValueError, match=f"out: {tmp_path} cannot be written to"):
        run(job, Quiet())
    assert not stored(job) and not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "access", lambda path, *_: Path(path).name == "mine")
    run(replace(job, steps=1, out=tmp_path / "mine"), Quiet())
    assert (tmp_path / "mine" / "model.safetensors").exists()


@pytest.mark.parametrize("compare", [False, True])
def test_a_disk_without_room_for_the_model_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: bool
) -> None:
    """Need and have are named; the comparison keeps the initial values too."""
    nbytes = 4 * sum(p.numel() for p in jobs.find_model("gpt2-1m").build().parameters())
    free = nbytes + outputs.SMALL_BYTES + (nbytes if compare else 0)
    watch = Quiet()
    for less, code in ((1, ValueError), (0, None)):
        monkeypatch.setattr(outputs, "free_bytes_at", lambda _, n=free - less: n)
        job = small(tmp_path, compare=compare)
        if code is None:
            run(job, watch)
            continue
        with pytest.raises(code, match=r"out: .* need [\d.]+ MiB in .*/out; [\d.]+ MiB are free"):
            run(job, watch)
        assert not watch.steps and not stored(job) and not (tmp_path / "out").exists()
    assert watch.steps


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the way to the weights, and each way works."""
    job = small(tmp_path)
    write = atomic_files.replacing

    def fail(*_: Any) -> Any:
        raise atomic_files.refused(tmp_path / "out", "cannot write", OSError(28, ""))

    monkeypatch.setattr("overspill.train.save.replacing", fail)
    with pytest.raises(OffloadError, match="No space left") as caught:
        run(job, Quiet())
    words, store = str(caught.value), job.offload["nvme"]
    assert f"--resume {store} instead of --nvme" in words
    assert f"`overspill export {store} FOLDER`" in words
    monkeypatch.setattr("overspill.train.save.replacing", write)
    export_store(store, tmp_path / "exported")
    offload = {key: value for key, value in job.offload.items() if key != "nvme"}
    watch = Quiet()
    assert run(replace(job, resume=(Path(store),), offload=offload), watch) is None
    exported = safetensors_torch.load_file(tmp_path / "exported" / "model.safetensors")
    written = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, exported[name]) for name, value in written.items())


# -- a run that has ended -------------------------------------------------------------------------


def test_resuming_a_finished_run_writes_the_files_that_are_missing(tmp_path: Path) -> None:
    job = small(tmp_path)
    run(job, Quiet())
    before = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    (store,) = (Path(job.offload["nvme"]),)
    offload = {key: value for key, value in job.offload.items() if key != "nvme"}
    again = replace(job, resume=(store,), offload=offload)
    told = "has done 4 steps already, and steps=4; ask for more steps than it has done, or write"
    with pytest.raises(ValueError, match=told):
        run(again, Quiet())
    shutil.rmtree(tmp_path / "out")
    watch = Quiet()
    assert run(again, watch) is None
    assert watch.notes[-1].startswith("the run had done all of its 4 steps: wrote ")
    after = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (tmp_path / "out" / "config.json").is_file()
    report = run(replace(again, steps=5), Quiet())  # and it may go on
    assert report is not None and [r.step for r in report.records] == [5]


def test_the_alternative_that_is_named_works(tmp_path: Path) -> None:
    job = interrupted(tmp_path)
    told = "and steps=2; ask for more steps than it has done, or write"
    with pytest.raises(ValueError, match=told) as caught:
        run(replace(job, steps=2), Quiet())
    (line,) = (part for part in str(caught.value).split("`") if part.startswith("overspill export"))
    words = line.replace("FOLDER", str(tmp_path / "exported")).split()
    result = call(*words[1:])
    assert result.exit_code == 0 and (tmp_path / "exported" / "model.safetensors").is_file()


def test_the_command_that_resumes_a_finished_run(tmp_path: Path) -> None:
    assert call(*command(tmp_path)).exit_code == 0
    shutil.rmtree(tmp_path / "out")
    words = [str(word) for word in command(tmp_path)]
    words[words.index("--nvme")] = "--resume"
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert "had done all of its 3 steps" in result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
