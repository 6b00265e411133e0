"""Remedies of what the commands say, and the traces, pages and folders that they write."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.doctor import disks
from overspill.facts.machine import Machine
from overspill.facts.trace import StepMark, Trace
from overspill.observe.memory_picture import draw_memory
from overspill.observe.page import page_of
from overspill.observe.trace_files import load_trace
from overspill.train import outputs
from overspill.train.data import Batches, load_corpus
from overspill.train.job import _refuse_on_ranks, run
from overspill.train.job_state import Progress
from tests.devices import CPU, about_cpu, about_files
from tests.remedies.table import (
    adamw,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip
from tests.unit.test_cli import call
from tests.unit.test_train_job import Quiet, small
from tests.unit.test_train_job import small as small_job
from tests.unit.test_train_job_resume import interrupted

pytestmark = about_files

PLAN = ["plan", "--device", "sim", "--device-memory", "64MiB", "--host-memory", "64MiB"]
COMMANDS: list[tuple[str, list[str], list[list[str]]]] = [
    ("--recompute and --activations keep differ; give one",
     ["gpt2-1m", "--recompute", "--activations", "keep"],
     [["gpt2-1m", "--recompute"], ["gpt2-1m", "--activations", "keep", "--tokens", "64"]]),
    ("MODEL is gpt2-1m and --model gpt2-124m; give one", ["gpt2-1m", "--model", "gpt2-124m"],
     [["gpt2-1m"], ["--model", "gpt2-1m"]]),
    ("--batch is a number of sequences; say how long they are with --seq",
     ["gpt2-1m", "--batch", "2"], [["gpt2-1m", "--batch", "2", "--seq", "16"]]),
]  # fmt: skip


def refused(part: str, *arguments: str | Path) -> None:
    """Require that a command ends with one line that contains ``part``."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert part in " ".join(result.output.split()), result.output


def works(*arguments: str | Path) -> None:
    result = call(*arguments)
    assert result.exit_code == 0, result.output


def made(folder: Path, steps: int = 2) -> Any:
    """A store with a few commits, and what the model was then."""
    model = net()
    with wrapped(model, nvme=folder) as optimizer:
        for number in range(steps):
            step(model, optimizer, number)
    return plain_run(steps)


def command(*words: Any, code: int = 0) -> str:
    """Run ``overspill`` with these words; what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@tries("offload/cli/bench_io.py", "is no size to move; write '1MiB'")
def test_bench_io(tmp_path: Path) -> None:
    bench = ("bench", "io", "--dir", tmp_path, "--no-keep", "--backend", "threads")
    refused("is no size to move; write '1MiB'", *bench, "--size", "0")
    works(*bench, "--size", "1MiB", "--block", "64KiB", "--depth", "2")


@about_files
@tries("offload/cli/plan.py", "--recompute and --activations {} differ; give one",
       "MODEL is {} and --model {}; give one",
       "--batch is a number of sequences; say how long they are with --seq")  # fmt: skip
@pytest.mark.parametrize(("words", "bad", "good"), COMMANDS, ids=[c[0][:20] for c in COMMANDS])
def test_plan(words: str, bad: list[str], good: list[list[str]]) -> None:
    assert words in command(*PLAN, *bad, code=2)
    for each in good:
        command(*PLAN, *each)


@tries("offload/cli/plan.py", "--largest looks for a model; leave MODEL out",
       "--options tries all values of --{}; leave it out",
       "--options and --largest are for AdamW; leave --optimizer out")  # fmt: skip
def test_plan_options() -> None:
    budgets = ("--device", "sim", "--device-memory", "1GiB", "--host-memory", "4GiB")
    refused("--largest looks for a model", "plan", "gpt2-1m", "--largest", *budgets)
    works("plan", "--largest", "--tokens", "0", *budgets)
    refused("--options tries", "plan", "gpt2-1m", "--options", "--moments", "int8", *budgets)
    works("plan", "gpt2-1m", "--options", "--lora-rank", "8", "--tokens", "0", *budgets)
    muon = ("--optimizer", "muon")
    refused("--options and --largest are", "plan", "gpt2-1m", "--options", *muon, *budgets)


@tries("offload/train/skeletons.py", "is unknown; use adamw or muon")
def test_the_optimizer_of_a_plan() -> None:
    plan = ("plan", "gpt2-1m", "--tokens", "0", "--host-memory", "4GiB", "--optimizer")
    refused("optimizer 'adam' is unknown; use adamw or muon", *plan, "adam")
    works(*plan, "muon")


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


@about_cpu
@tries("offload/observe/memory_picture.py", "the trace has no memory figures; write one with")
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
@tries("offload/train/job_state.py", "train; continue it with overspill.resume in the program that")
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


@about_cpu
@tries("offload/observe/trace_files.py", "train at least one step first",
       "write one with optimizer.trace('trace.json')")  # fmt: skip
@tries("offload/observe/pictures.py", "name a file that ends in .png, .svg or .pdf",
       "train at least one step first")  # fmt: skip
def test_traces(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "trace.json", tmp_path / "out.svg"
    file.write_text("{}")
    assert "write one with optimizer.trace('trace.json')" in command("trace", file, code=2)
    model = net()
    with wrapped(model) as optimizer:
        optimizer.trace(file)
        assert "train at least one step first" in command("trace", file, "--png", picture, code=2)
        step(model, optimizer)
        step(model, optimizer, 1)
        optimizer.trace(file)
        words = "name a file that ends in .png, .svg or .pdf"
        assert words in command("trace", file, "--png", tmp_path / "out.xyz", code=2)
        for kind in ("png", "svg", "pdf"):
            command("trace", file, "--png", tmp_path / f"out.{kind}")
            assert (tmp_path / f"out.{kind}").stat().st_size


@tries("offload/train/data.py", "give more text or lower seq")
def test_text_that_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("few words")
    with says("give more text or lower seq"):
        Batches(load_corpus(file, None, 256), 1, 64, 0)
    assert Batches(load_corpus(file, None, 256), 1, 4, 0).windows
    file.write_text("many words " * 100)
    assert Batches(load_corpus(file, None, 256), 1, 64, 0).windows


@about_cpu
@tries("offload/planning/planner.py", "give a directory with nvme=, or raise host_memory",
       "free disk space, raise nvme_memory or set durable=False (half the size)")  # fmt: skip
@pytest.mark.parametrize("remedy", ["nvme", "host_memory", "nvme_memory", "durable"])
def test_models_that_do_not_fit(remedy: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return net(depth=40)

    with says("give a directory with nvme=, or raise host_memory"):
        wrapped(build(), host_memory="160KiB")
    options: dict[str, Any] = {"host_memory": "160KiB", "nvme": tmp_path}
    if remedy == "host_memory":
        options = {"host_memory": "16MiB"}
    elif remedy != "nvme":
        short = {**options, "nvme_memory": "500KiB"}
        with says("raise nvme_memory or set durable=False (half the size)"):
            wrapped(build(), **short)
        options = {**short, "durable": False}
        if remedy == "nvme_memory":
            options = {**short, "nvme_memory": "8MiB"}
    model = build()
    with wrapped(model, **options) as optimizer:
        trains(model, optimizer)


@tries("offload/train/job.py",
       "compare trains in the memory of one rank; run it without torchrun",
       "precision fp16 needs a loss scale that all ranks share; use bf16")  # fmt: skip
@tries(
    "offload/train/training_loop.py",
    "; lower the learning rate (lr), clip with max_grad_norm, or train",
)
def test_jobs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    several, alone = Mock(several=True), Mock(several=False)
    job = small(tmp_path, compare=True)
    with says("run it without torchrun"):
        _refuse_on_ranks(job, several)
    _refuse_on_ranks(job, alone)
    with says("use bf16"):
        _refuse_on_ranks(small(tmp_path, offload={"precision": "fp16"}), several)
    _refuse_on_ranks(small(tmp_path, offload={"precision": "bf16"}), several)
    with says("lower the learning rate (lr), clip with max_grad_norm, or train in bf16 or fp32"):
        run(small(tmp_path, steps=12, lr=1e30), Quiet())
    assert run(small(tmp_path, lr=1e-3), Quiet()) is not None
