"""Remedies of what the commands say, and of what plans and exports say about disks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import overspill
from overspill.doctor import disks
from overspill.durable import export, inspect, moving
from overspill.facts.machine import Machine
from overspill.facts.trace import StepMark, Trace
from overspill.io_engine.manifest import MANIFEST_NAME, RecordKind, read_manifest
from overspill.observe.export import load_trace
from overspill.observe.memory_picture import draw_memory
from overspill.observe.page import page_of
from overspill.train import outputs
from overspill.train.job import run
from overspill.train.progress import Progress
from tests.devices import CPU, about_cpu, about_files
from tests.remedies.table import adamw, net, plain_run, same, says, step, trains, tries, wrapped
from tests.unit.test_cli import call
from tests.unit.test_train_job import Quiet
from tests.unit.test_train_job import small as small_job
from tests.unit.test_train_job_resume import interrupted

pytestmark = about_files


def refused(part: str, *arguments: str | Path) -> None:
    """Require that a command ends with one line that contains ``part``."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert part in " ".join(result.output.split()), result.output


def works(*arguments: str | Path) -> None:
    result = call(*arguments)
    assert result.exit_code == 0, result.output


@tries("offload/cli/bench_io.py", "is no size to move; write '1MiB'")
def test_bench_io(tmp_path: Path) -> None:
    bench = ("bench", "io", "--dir", tmp_path, "--no-keep", "--backend", "threads")
    refused("is no size to move; write '1MiB'", *bench, "--size", "0")
    works(*bench, "--size", "1MiB", "--block", "64KiB", "--depth", "2")


@tries("offload/cli/plan.py", "--largest looks for a model; leave MODEL out",
       "--options tries moments, packed bases and LoRA; leave them out")  # fmt: skip
def test_plan() -> None:
    budgets = ("--device", "sim", "--device-memory", "1GiB", "--host-memory", "4GiB")
    refused("--largest looks for a model", "plan", "gpt2-1m", "--largest", *budgets)
    works("plan", "--largest", "--tokens", "0", *budgets)
    refused("--options tries", "plan", "gpt2-1m", "--options", "--moments", "int8", *budgets)
    works("plan", "gpt2-1m", "--options", "--tokens", "0", *budgets)


@tries("offload/plans.py", ", or give --tokens 0 (tokens=0)",
       "not known, but this plan needs them; add them to the machine's file")  # fmt: skip
def test_rates_of_a_machine() -> None:
    model = net()
    rates = overspill.Rates(h2d_bytes_s=1e9, d2h_bytes_s=1e9, dram_bytes_s=1e9)
    machine = Machine("mine", rates, device_memory="1GiB", host_memory="1GiB")
    with says("update_params_s, device_flops_s not known, but this plan needs them; add them"):
        overspill.plan(model, adamw(model), machine=machine, tokens=64)
    more = replace(machine, rates=replace(rates, update_params_s=1e9))
    with says("device_flops_s not known, but this plan needs them; add them to the machine's file, "
              "or give --tokens 0 (tokens=0)"):  # fmt: skip
        overspill.plan(model, adamw(model), machine=more, tokens=64)
    assert overspill.plan(model, adamw(model), machine=more, tokens=0).fits
    most = replace(more, rates=replace(more.rates, device_flops_s=1e12))
    assert overspill.plan(model, adamw(model), machine=most, tokens=64).fits


@tries("offload/doctor/disks.py", "name another directory, or free space in this one",
       "free some, or name several directories")  # fmt: skip
def test_doctor_of_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    good.mkdir()
    found = disks.direct(bad)  # it is not there
    assert found.remedy == "name another directory, or free space in this one"
    assert disks.direct(good).state is disks.State.GOOD
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Mock(total=1 << 30, free=0))
        assert disks.room(good).remedy == "free some, or name several directories"
    assert disks.room(good).remedy != "free some, or name several directories"


# -- stores ----------------------------------------------------------------------------------------


def made(folder: Path, steps: int = 2) -> Any:
    """A store with a few commits, and what the model was then."""
    model = net()
    with wrapped(model, nvme=folder) as optimizer:
        for number in range(steps):
            step(model, optimizer, number)
    return plain_run(steps)


@tries("offload/durable/export.py", "there; make room, export elsewhere, or leave the optimizer's")
def test_an_export_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    expected = made(store)
    weights = sum(p.nbytes for p in expected.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(export, "free_bytes_at", lambda path: 2 * weights)
        with says("make room, export elsewhere, or leave the optimizer's state out"):
            export.export_store(store, out)
        export.export_store(store, out, optimizer=False)
    export.export_store(store, tmp_path / "elsewhere")
    for each in (out, tmp_path / "elsewhere"):
        model = net(seed=1)
        with wrapped(model, weights=each):
            same(model, expected)


def spoil(folder: Path) -> None:
    """Damage every commit of a store, each followed by a whole record."""
    found = read_manifest(folder)
    assert found is not None
    commits = [each for each in found.log.records if each.kind == RecordKind.COMMIT]
    with (folder / MANIFEST_NAME).open("r+b") as log:
        for each in commits:
            log.seek(each.offset)
            log.write(b"\x01" * 64)


@tries("io_engine/committed.py", "no commit is whole; start from an export")
@tries("offload/durable/inspect.py", ": no commit is whole; start from an export")
def test_a_store_without_a_whole_commit(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    expected = made(store)
    export.export_store(store, out)
    spoil(store)
    model = net(seed=1)
    with says("no commit is whole; start from an export"):
        overspill.resume(model, store, adamw(model), device=CPU)
    with says("no commit is whole; start from an export"):
        inspect.repair_store(store)
    with wrapped(model, weights=out) as optimizer:
        optimizer.load_state_dict(out)
        same(model, expected)
        trains(model, optimizer, first=2)


@tries("offload/durable/inspect.py", "try again when the run has ended, or call optimizer.save(")
def test_an_export_beside_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    store.mkdir()
    model = net()
    unmoved = inspect.require_unmoved
    with wrapped(model, nvme=store, checksum=False) as optimizer:

        def committed(*given: Any) -> None:
            step(model, optimizer)
            optimizer.commit()
            found = inspect.find_store(store)
            unmoved(given[0], given[1], found)

        step(model, optimizer)
        optimizer.commit()
        monkeypatch.setattr(export, "require_unmoved", committed)
        with says("try again when the run has ended, or call optimizer.save(path) in it"):
            export.export_store(store, tmp_path / "out")
        monkeypatch.undo()
        optimizer.save(tmp_path / "saved")
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    export.export_store(store, tmp_path / "out")
    for each in ("saved", "out"):
        other = net(seed=1)
        with wrapped(other, weights=tmp_path / each):
            assert all(torch.equal(v, expected[n]) for n, v in other.state_dict().items())


@tries("offload/durable/moving.py", ": another process has taken the copy; try again")
def test_a_copy_that_another_process_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for each in (one, two, other):
        each.mkdir()
    expected = made(one)
    made(other)
    own = moving.own_store

    def theirs(directories: Any) -> Any:
        if list(directories) != [two]:
            return own(directories)
        return own([other])

    model = net(seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(moving, "own_store", theirs)
        with says("another process has taken the copy; try again"):
            overspill.resume(model, one, adamw(model), nvme=two, device=CPU)
    for each in two.iterdir():  # that process has ended, and left nothing
        each.unlink()
    model = net(seed=1)
    optimizer, _ = overspill.resume(model, one, adamw(model), nvme=two, device=CPU)
    same(model, expected)
    optimizer.close()


@tries("offload/durable/resume.py", "not {}; leave {} out", "not {}; leave checksum out")
@tries("offload/schedule/describe.py", "otherwise; use frozen= and resident= of the")
def test_other_formats_than_the_stores(tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        model[0].requires_grad_(requires_grad=False)
        return model

    def resumed(**options: Any) -> None:
        model = made()
        overspill.resume(model, tmp_path, adamw(model), device=CPU, **options)[0].close()

    with wrapped(made(), nvme=tmp_path, frozen="int8") as optimizer:
        optimizer.commit()
    with says("the store was made with moments='fp32', not 'int8'; leave moments out"):
        resumed(moments="int8")
    with says("the store was made with checksum=True, not False; leave checksum out"):
        resumed(checksum=False)
    with says("its frozen weights are kept otherwise; use frozen= and resident= of the store"):
        resumed(resident=["0"])
    resumed()


# -- training --------------------------------------------------------------------------------------


@about_cpu
@tries("offload/observe/memory_picture.py", "the trace says nothing of memory; write one with")
def test_a_trace_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = Trace()
    trace.add_step(StepMark(1, 0, 10))
    with says("write one with optimizer.trace()"):
        draw_memory(trace, tmp_path / "memory.png")
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
        step(model, optimizer, 1)
        optimizer.trace(tmp_path / "trace.json")
    draw_memory(load_trace(tmp_path / "trace.json"), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 0


@tries("offload/observe/page.py", "is missing; give the folder that `overspill train --out` wrote")
@tries("offload/train/progress.py", "train; continue it with overspill.resume in the program that")
@tries("offload/train/job.py", "compare trains from the first step on; leave it out with resume")
def test_runs(tmp_path: Path) -> None:
    with says("give the folder that `overspill train --out` wrote"):
        page_of(tmp_path)
    job = interrupted(tmp_path)
    with says("compare trains from the first step on; leave it out with resume"):
        replace(job, compare=True)
    assert run(job, Quiet()) is not None
    assert "<html" in page_of(Path(job.out))
    store = tmp_path / "other"
    store.mkdir()
    expected = made(store)
    with says("continue it with overspill.resume in the program that made it"):
        Progress(job.__dict__).take(None)
    model = net(seed=1)
    optimizer, _ = overspill.resume(model, store, adamw(model), device=CPU)
    same(model, expected)
    optimizer.close()


@tries("offload/train/outputs.py", "is not a folder; name another folder for the run's files",
       "are free there; free space, or name another folder")  # fmt: skip
def test_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(tmp_path)
    (tmp_path / "file").write_text("")
    with says("name another folder for the run's files"):
        run(replace(job, out=tmp_path / "file"), Quiet())
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "free_bytes_at", lambda path: 1000)
        with says("free space, or name another folder"):
            run(job, Quiet())
    report = run(job, Quiet())
    assert report is not None and (Path(job.out) / "model.safetensors").exists()
