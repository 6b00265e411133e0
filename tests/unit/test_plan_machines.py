"""Plans for machines that are not here: files, bare model trees, and the command."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import overspill
from overspill.api import plan
from overspill.cli.app import app
from overspill.facts.machine import Machine
from overspill.train.shapes import SHAPES, find_model, plan_model
from overspill.train.skeletons import skeleton

ROOT = Path(__file__).parents[2]
MACHINES = sorted((ROOT / "examples/machines").glob("*.toml"))
RATES = {"h2d_bytes_s": 1e9, "disk_read_bytes_s": 1e9, "disk_write_bytes_s": 1e9}


def call(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize("name", ["gpt2-1m", "gpt2-25m", "llama-30m", "llama-160m"])
def test_bare_trees_have_the_parameters_of_the_model(name: str) -> None:
    bare, real = plan_model(name), find_model(name).build()
    mine = {n: tuple(p.shape) for n, p in bare.named_parameters()}
    assert mine == {n: tuple(p.shape) for n, p in real.named_parameters()}
    assert all(p.is_meta for p in bare.parameters())


def test_a_config_file_is_enough(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 99,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = plan_model(str(path))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in plan_model(str(tmp_path)).parameters()
    )
    with pytest.raises(ValueError, match="lacks 'hidden_size'"):
        skeleton({"model_type": "llama"})
    assert skeleton({"model_type": "mamba"}) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
@pytest.mark.parametrize(
    "path",
    [MACHINES[0], *(pytest.param(path, marks=pytest.mark.soak) for path in MACHINES[1:])],
    ids=lambda path: path.stem,
)
def test_the_example_machines_plan_70_b(path: Path) -> None:
    model = plan_model("llama-70b")
    adamw = torch.optim.AdamW(model.parameters())
    made = plan(
        model, adamw, machine=Machine.from_file(path), tokens=4096, precision="bf16",
        prefetch_depth=3, nvme_memory="1.2TB",  # the smallest machine has less
    )  # fmt: skip
    assert made.fits, made.shortfalls
    assert made.step_s is not None and made.bound_s is not None
    assert made.step_s >= made.bound_s > 1


def test_machines_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "fast.json"
    path.write_text(json.dumps({"rates": RATES, "host_memory": "1GiB", "disks": 2}))
    machine = Machine.from_file(path)
    assert machine.name == "fast" and machine.disks == 2
    assert machine.rates == overspill.Rates(**RATES)
    path.write_text(json.dumps(RATES))
    assert Machine.from_file(path) == Machine("fast", overspill.Rates(**RATES))
    for text, what in (
        ('{"rates": {}, "gpus": 2}', "unknown key gpus"),
        ('{"rates": {"speed": 1}}', "unknown rate speed"),
        ('{"name": "x", "h2d_bytes_s": 1}', r"needs its rates in the table \[rates\]"),
        ('{"rates": {}, "disks": 0}', "disks must be"),
        ("[1]", "expected a table"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=what):
            Machine.from_file(path)


def test_the_command_answers_in_json_and_writes_a_trace(tmp_path: Path) -> None:
    machine = tmp_path / "small.json"
    machine.write_text(json.dumps({
        "device_memory": "64MiB", "host_memory": "100MiB", "nvme_memory": "2GB",
        "endurance": "600TB", "rates": {**RATES, "d2h_bytes_s": 1e9, "update_params_s": 1e8,
                                        "device_flops_s": 1e12},
    }))  # fmt: skip
    trace = tmp_path / "plan.png"
    result = call("plan", "--model", "gpt2-25m", "--rates", str(machine), "--json",
                  "--trace", str(trace), "--tokens", "512")  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["fits"] and figures["step_s"] >= figures["bound_s"] > 0
    assert figures["tokens_s"] == pytest.approx(512 / figures["step_s"])
    assert figures["step_s_with"]["one more disk"] < figures["step_s"]
    assert 0 < figures["endurance_days"] < 100_000
    assert trace.stat().st_size > 10_000
    assert 2 * 10**7 < figures["activation_bytes"] < 4 * 10**8
    text = call("plan", "gpt2-25m", "--rates", str(machine), "--endurance", "1200TB",
                "--tokens", "512").output  # fmt: skip
    for words in (
        "of activations (auto, ",
        "with other modes: ",
        "a step takes",
        "compute waits for",
        "with twice the tokens",
        "endurance",
    ):
        assert words in text
    assert "half the accumulation" not in text
    result = call("plan", "gpt2-25m", "--rates", str(machine), "--tokens", "512",
                  "--accumulate", "4", "--json")  # fmt: skip
    figures = json.loads(result.output)
    larger = figures["step_s_with"]["twice the micro-batch and half the accumulation"]
    assert larger < figures["step_s"], "weights move half as often for as many tokens"


def test_commits_that_are_rarer_write_less(tmp_path: Path) -> None:
    machine = tmp_path / "roomy.json"
    machine.write_text(json.dumps({
        "device_memory": "64MiB", "host_memory": "1GiB", "nvme_memory": "4GB",
        "rates": {**RATES, "d2h_bytes_s": 1e9, "update_params_s": 1e8, "device_flops_s": 1e12},
    }))  # fmt: skip
    written = []
    for every in ("1", "10"):
        result = call("plan", "--model", "gpt2-25m", "--rates", str(machine), "--json", "--nvme",
                      str(tmp_path), "--tokens", "512", "--commit-every", every)  # fmt: skip
        assert result.exit_code == 0, result.output
        written.append(json.loads(result.output)["link_bytes"]["write"])
    assert 0 < written[1] < 0.2 * written[0]


def test_bad_input_says_what_would_help(tmp_path: Path) -> None:
    assert "did you mean" in call("plan", "--model", "llama-70g").output
    missing = call("plan", "--rates", str(tmp_path / "none.toml"))
    assert missing.exit_code != 0 and "none.toml" in missing.output
    part = tmp_path / "part.json"
    part.write_text(json.dumps({"host_memory": "2GiB", "nvme_memory": "9GB", "rates": RATES}))
    refused = call("plan", "--model", "gpt2-124m", "--rates", str(part))
    assert refused.exit_code == 2
    for words in ("rates of part: update_params_s, device_flops_s not known", "add them to the"):
        assert words in refused.output.replace("\n", " "), refused.output
    tiny = tmp_path / "tiny.json"
    tiny.write_text(json.dumps({"host_memory": "4MiB", "rates": RATES}))
    refused = call("plan", "--model", "gpt2-124m", "--rates", str(tiny))
    assert refused.exit_code != 0 and "raise host_memory" in refused.output
    full = call("plan", "--model", "gpt2-124m", "--nvme", str(tmp_path), "--nvme-memory", "64MiB",
                "--device", "cpu", "--host-memory", "512MiB")  # fmt: skip
    assert full.exit_code == 2
    for words in ("the store needs", "of nvme memory", "the budget is 64 MiB", "raise nvme_memory"):
        assert words in full.output.replace("\n", " "), full.output
    gone = call("plan", "--model", "gpt2-1m", "--nvme", str(tmp_path / "none"), "--device", "cpu")
    assert gone.exit_code == 2 and "none" in gone.output


def test_a_plan_of_70_b_needs_little() -> None:
    """In a process of its own: nothing heavy is imported, and memory stays small."""
    script = (
        "import sys\n"
        "from overspill.cli.app import app\n"
        "try:\n"
        "    app(['plan', 'llama-70b', '--precision', 'bf16',\n"
        f"         '--rates', {str(MACHINES[-1])!r}])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert not {'transformers', 'torch._dynamo'} & set(sys.modules)\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss begins with the parent's memory
        "print(status.split('VmHWM:')[1].split()[0])\n"
    )
    if sys.version_info < (3, 11):
        pytest.skip("TOML needs Python 3.11")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 1_000_000, "kilobytes of RSS"
    assert after.ru_utime - before.ru_utime < 25, "8 s on a machine with nothing else to do"
    assert "llama-70b" in SHAPES


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_a_plan_says_that_it_counts_on_a_loss_in_chunks() -> None:
    """A head of a model with many tokens: its logits are not counted as a whole."""
    said = "if the loss is computed in chunks"
    for tokens, there in (("512", False), ("8192", True)):
        text = call("plan", "llama-1b", "--rates", str(MACHINES[0]), "--tokens", tokens).output
        assert text.count(said) == there, text
