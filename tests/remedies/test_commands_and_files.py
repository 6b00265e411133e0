"""Remedies of what commands, traces, reports and the reader of weight files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.train.data import Batches, load_corpus
from tests.devices import CPU, about_cpu, about_files
from tests.remedies.table import (
    WIDTH,
    adamw,
    logged,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip


def command(*words: Any, code: int = 0) -> str:
    """Run ``overspill`` with these words; what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


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


@about_files
@tries("offload/cli/plan.py", "--recompute and --activations {} differ; give one",
       "MODEL is {} and --model {}; give one",
       "--batch is a number of sequences; say how long they are with --seq")  # fmt: skip
@pytest.mark.parametrize(("words", "bad", "good"), COMMANDS, ids=[c[0][:20] for c in COMMANDS])
def test_plan(words: str, bad: list[str], good: list[list[str]]) -> None:
    assert words in command(*PLAN, *bad, code=2)
    for each in good:
        command(*PLAN, *each)


@about_cpu
@tries("offload/observe/export.py", "train at least one step first",
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


# -- weights from files ----------------------------------------------------------------------------


@tries("offload/state/importing.py",
       "quantised by {} ({} in config.json), which cannot be read; use a folder with bf16",
       "they belong to quantised weights, which cannot be read: use a folder with")  # fmt: skip
@tries("offload/state/weight_files.py", "quantised files cannot be read; use a folder with bf16")
@pytest.mark.parametrize("case", ["config", "scales", "codes"])
def test_quantised_weights(case: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    weights = {name: value.contiguous() for name, value in net(seed=3).cpu().state_dict().items()}
    for folder in (good, bad):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    if case == "config":
        (bad / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "x"}}))
    elif case == "scales":
        more = {"0.0.weight_scale": torch.ones(WIDTH, 1)}
        save_file({**weights, **more}, bad / "model.safetensors")
    else:
        coded = {"0.0.weight": weights["0.0.weight"].to(torch.float8_e4m3fn)}
        save_file({**weights, **coded}, bad / "model.safetensors")
    model = net()
    with says("use a folder with bf16, fp16 or fp32 weights"):
        wrapped(model, weights=bad)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        typed = {name: value.to(dtype) for name, value in weights.items()}
        save_file(typed, good / "model.safetensors")
        model = net()
        with wrapped(model, weights=good) as optimizer:
            for name, value in model.state_dict().items():
                assert torch.equal(value.cpu(), typed[name].float()), name
            trains(model, optimizer)


@tries("offload/durable/files.py", "use torch.save(model.state_dict(), path) instead")
def test_a_tensor_that_the_format_cannot_hold(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    model = net()
    model.register_buffer("turns", torch.ones(3, dtype=torch.complex128))
    with wrapped(model, nvme=place) as optimizer:
        step(model, optimizer)
        with says("use torch.save(model.state_dict(), path) instead"):
            optimizer.save(tmp_path / "out")
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        other = net(seed=1)
        other.register_buffer("turns", torch.zeros(3, dtype=torch.complex128))
        other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        same(other, model)


@tries("offload/durable/sums.py", "export again, or copy it again")
def test_an_export_that_is_damaged(tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    model = net()
    with wrapped(model, nvme=place) as optimizer:
        step(model, optimizer)
    command("export", place, out)
    whole = tmp_path / "whole"
    shutil.copytree(out, whole)
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "export again, or copy it again" in command("inspect", out, code=1)
    shutil.copy(whole / file.name, file)
    command("inspect", out)
    shutil.rmtree(out)
    command("export", place, out)
    command("inspect", out)
    other = net(seed=1)
    other.load_state_dict(load_file(file))
    same(other, plain_run(1))


@tries("offload/durable/commits.py", "make it again, or call rollback()")
@pytest.mark.parametrize("way", ["again", "rollback"])
def test_an_edit_that_is_interrupted(way: str, tmp_path: Path) -> None:
    model = net()
    with wrapped(model, nvme=tmp_path) as optimizer:
        step(model, optimizer)
        optimizer.commit()
        weights = {name: value.clone() for name, value in model.state_dict().items()}

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model[1].register_load_state_dict_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model.load_state_dict(weights)
        handle.remove()
        with says("make it again, or call rollback()"):
            optimizer.commit()
        if way == "again":
            model.load_state_dict(weights)
        else:
            optimizer.rollback()
        optimizer.commit()
        step(model, optimizer, 1)
        same(model, plain_run(2))


@tries("offload/schedule/describe.py", "set precision= as the store was made with")
def test_a_store_of_other_formats(tmp_path: Path) -> None:
    model = net()
    with wrapped(model.bfloat16(), nvme=tmp_path) as optimizer:
        step(model, optimizer)
    other = net(seed=1)
    with says("set precision= as the store was made with"):
        overspill.resume(other, tmp_path, adamw(other), device=CPU)
    other = net(seed=1).bfloat16()
    optimizer, _ = overspill.resume(other, tmp_path, adamw(other), device=CPU)
    with optimizer:
        trains(other, optimizer, 1)


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


@tries("offload/training/recompute.py", "pass activations='host' if it must not")
def test_a_unit_that_changes_itself_late(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count, self.late = nn.Linear(WIDTH, WIDTH), 0, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += self.late
            return torch.tanh(self.linear(x))

    for activations, warns in (("recompute", True), ("host", False)):
        model = nn.Sequential(*[Counts() for _ in range(3)])
        with wrapped(model, activations=activations) as optimizer:
            for number in range(3):
                step(model, optimizer, number)
            for each in model:
                each.late = True
            step(model, optimizer, 3)
            assert logged(caplog, "pass activations='host' if it must not") is warns
            if not warns:
                assert [each.count for each in model] == [1, 1, 1]
