"""``make gpu`` on sim: it comes to its end, and keeps what it has when cut; each case fits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import arms, gpu, megatrain, roundpipe
from benchmarks.as_transformers import AsTransformers
from benchmarks.gpu_cases import CASES, CUDA, SIM, Case, needs
from benchmarks.machine import ROOT
from benchmarks.model import Llama, Shape, batch_of, build
from benchmarks.runner import Row, Sample
from benchmarks.trainees import filled, make
from tests.patience import WAIT_S

OURS = [
    Case("1 B", "torch", batches=(8, 32)),
    Case("1 B", "deepspeed-nvme"),
    Case("1 B", "NVMe", "backward", (8, 32)),
]


def test_it_comes_to_its_end_on_sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs to its end on sim; arms are rows, ours train alike."""
    monkeypatch.setenv("OVERSPILL_PEERS", str(tmp_path / "none"))
    gpu.run_steps(SIM, tmp_path, time.monotonic() + 90, OURS)
    small, large = json.loads((tmp_path / "gpu.json").read_text())["comparisons"]
    assert [bool(row["error"]) for row in small["rows"]] == [False, True, False]
    assert [bool(row["error"]) for row in large["rows"]] == [False, False]
    assert "peers install deepspeed" in small["rows"][1]["error"]
    plain, ours = small["rows"][0], small["rows"][2]
    losses = [row["samples"][-1]["seen"]["loss"] for row in (plain, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for batch in (8, 32):  # what explains a time
        about = tmp_path / f"gpu-lanes-1B-NVMe-backward-keep-{batch}"
        assert json.loads(about.with_suffix(".json").read_text())["traceEvents"]
        assert "bound" in about.with_suffix(".txt").read_text()
        assert "update_params_s: " in about.with_suffix(".txt").read_text()
    seen = small["rows"][2]["samples"][-1]["seen"]
    assert seen["lanes"]["update"]["busy_s"] > 0 and seen["threads_s"]["MainThread"] >= 0
    assert not list(tmp_path.glob("store-*"))


def test_suites_leave_a_log_and_their_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "test_it.py"
    suite.write_text(
        "import os, time\n"
        "def test_where(): assert os.environ['OVERSPILL_TEST_DEVICE'] == 'cuda'\n"
        "def test_first(): assert 'told' == 'at once'\n"
        "def test_wrong():\n    found = 41\n    assert found == 42\n"
        "def test_slow(): time.sleep(60)\n"
    )
    passes, fails = (f"{suite}::test_{name}" for name in ("where", "wrong"))
    log = tmp_path / "tests.log"
    assert gpu.run_tests("cuda", [passes], log, 60)
    assert not gpu.run_tests("cuda", [passes, fails], log, 60)
    assert "found      = 41" in log.read_text() and "1 failed, 1 passed" in capsys.readouterr().out
    assert not gpu.run_tests("cuda", [f"{suite}::test_first", f"{suite}::test_slow"], log, 10)
    assert "ended after 10 s" in log.read_text() and "'told' == 'at once'" in log.read_text()


def test_an_arm_without_time_left_is_a_row_that_says_so() -> None:
    plan = arms.Plan(SIM.shapes["1 B"], "bf16", rounds=1, steps=1, warmup=2)
    late = arms.Worker("late", plan, "cpu", None)
    rows = gpu.alone(late, (8, 32), 1, time.monotonic(), 60)
    assert [row.error for row in rows] == ["not run: the time was up"] * 2
    cut = arms.Worker("cut", plan, "cpu", None)
    rows = gpu.alone(cut, (8, 32), 1, time.monotonic() + 0.5, 60)
    assert all(row.error and "the time was up" in row.error for row in rows)
    slow = arms.Worker("slow", plan, "cpu", None)
    (row,) = gpu.alone(slow, (8,), 1, time.monotonic() + 60, 0.5)
    assert row.error is not None and "over 0 s" in row.error


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_keeps_what_it_has(tmp_path: Path, how: signal.Signals) -> None:
    """What was measured is kept; no arm goes on; after a SIGTERM no store is left."""
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "sim", "--out", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OVERSPILL_PEERS": str(tmp_path / "none")},
    )  # fmt: skip
    until = time.monotonic() + 50
    while not (tmp_path / "gpu.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    started = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(how)
    running.wait(WAIT_S)
    assert not psutil.wait_procs(started, timeout=WAIT_S)[1], "an arm is left behind"
    rows = json.loads((tmp_path / "gpu.json").read_text())["comparisons"][0]["rows"]
    assert rows[0]["median_s"] > 0
    about = (tmp_path / "environment.txt").read_text()
    assert f"torch=={version('torch')}" in about and re.search("NVSMI|nvidia-smi", about)
    assert (tmp_path / "arms.log").exists()
    if how == signal.SIGTERM:
        assert not list(tmp_path.glob("store-*"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {case.name}")
def test_every_case_fits_the_machine(case: Case) -> None:
    """141 GB on the device, 128 GB of memory, 64 GB of disk; a twentieth is left free."""
    taken = needs(case, CUDA)
    assert taken.device < 0.95 * 141e9
    assert taken.host < 0.95 * 128e9
    assert taken.disk < 0.95 * 64e9


def test_what_would_not_fit_is_seen() -> None:
    assert needs(Case("7 B", "deepspeed-zero3")).host > 128e9
    assert needs(Case("7 B", "NVMe", "backward")).disk > 64e9
    assert needs(Case("7 B", "torch", batches=(96,))).device > 141e9


def test_the_priorities_hold_what_was_asked_for() -> None:
    found = {(case.model, case.name) for case in CASES}
    for place in ("host", "NVMe"):
        for update in ("backward", "next_forward", "step"):
            assert ("1 B", f"overspill, {place}, {update}") in found
    assert all(case.batches == (8, 32) for case in CASES if case.model == "7 B")


def test_transformers_llama_is_ours() -> None:
    """The arm of its activation offload trains as ours does; page-locked memory needs a device."""
    shape = Shape(2, 32, 4, 64, 2, 16, kv_heads=2, inner=80)
    ours, theirs = (filled(build(shape), torch.device("cpu")) for _ in range(2))
    arm = AsTransformers(theirs, torch.device("cpu"), offload=False)
    losses = []
    for model in (ours, arm):
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        mine = []
        for number in range(3):
            loss = model(batch_of(shape, number))
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            mine.append(float(loss))
        losses.append(mine)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][2]


def test_megatrain_sees_our_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as its engine calls a model's parts, the shell gives what the model gives."""
    shape = Shape(2, 32, 4, 64, 2, 16, kv_heads=2, inner=80)
    model = filled(build(shape), torch.device("cpu"))
    shell, tokens = megatrain.Shell(model), batch_of(shape, 0)
    inputs = tokens[:, :-1]
    hidden = shell.model.embed_tokens(inputs)
    turns = shell.model.rotary_emb(hidden, torch.arange(inputs.shape[1])[None])
    for layer in shell.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=turns)
    logits = shell.lm_head(shell.model.norm(hidden))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(float(model(tokens)), rel=1e-6)
    monkeypatch.delenv(megatrain.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="names no checkout of MegaTrain"):
        make("megatrain", build(shape), "cpu", {"batch": 2, "tokens": 16})


def test_roundpipe_gets_our_llama_as_layers() -> None:
    shape = Shape(2, 32, 4, 64, 2, 16, kv_heads=2, inner=80)
    model = filled(build(shape), torch.device("cpu"))
    assert isinstance(model, Llama)
    tokens = batch_of(shape, 0)
    loss = roundpipe.loss_of(roundpipe.layers_of(model)(tokens[:, :-1]), tokens[:, 1:])
    assert float(loss) == float(model(tokens))
    with pytest.raises(RuntimeError, match="RoundPipe needs a GPU"):
        make("roundpipe", build(shape), "cpu", {})


@pytest.mark.parametrize("engine", ["megatrain", "transformers", "roundpipe"])
def test_arms_of_the_llama_refuse_another_model(engine: str) -> None:
    with pytest.raises(RuntimeError, match="Llama of `make gpu` only"):
        make(engine, build(Shape(1, 32, 4, 64, 2, 16)), "cpu", {"offload": True})


def test_goals_are_held_to_the_rows() -> None:
    def row(name: str, seconds: float) -> Row:
        seen = {"peak_rss_bytes": 13_000}
        facts = {"idle_rss_bytes": 1000, "parameters": 1000}
        return Row(name, facts, (Sample(seconds, seen),), median_s=seconds)

    rows = [row("torch", 1.0), row("overspill, host, step", 1.25), row("deepspeed-zero3", 2.0)]
    assert gpu.goals(rows[1], rows) == (
        "0.80 of torch, under 0.95; 1.60 of deepspeed-zero3, under 2.0; 12.0 bytes a parameter, met"
    )
    assert gpu.goals(rows[0], rows) == "-"
    large = [replace(each, facts={**each.facts, "parameters": 7e9}) for each in rows]
    large[1] = replace(large[1], median_s=1.1)
    assert gpu.goals(large[1], large).startswith("0.91 of torch, met")
    disk = row("overspill, NVMe, step", 1.0)
    assert gpu.goals(disk, [*rows, row("deepspeed-nvme", 3.5)]) == "3.50 of deepspeed-nvme, met"
