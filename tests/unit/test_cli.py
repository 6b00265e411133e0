"""The command line: what it accepts, how it refuses, and what it prints."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.cli.progress import LiveWatch, PlainWatch, make_watch
from overspill.facts.stats import LaneStats, MemoryStats, Stats
from overspill.facts.trace import LANES
from overspill.train.training_loop import StepRecord

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


def call(*arguments: str | Path) -> Any:
    """Runs the command; its exit code and all that it printed."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def small(tmp_path: Path, *more: str | Path) -> list[str | Path]:
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 100)
    return [
        "train", "--model", "gpt2-1m", "--data", tmp_path / "text.txt", "--steps", "3",
        "--batch", "2", "--seq", "32", "--device", "sim", "--device-memory", "3MiB",
        "--host-memory", "6MiB", "--nvme", tmp_path / "store", "--out", tmp_path / "out", *more,
    ]  # fmt: skip


def test_a_run_prints_its_table_and_files(tmp_path: Path) -> None:
    result = call(*small(tmp_path, "--compare"))
    assert result.exit_code == 0, result.output
    for words in (
        "gpt2-1m: random weights", "text.txt: 1 file", "holds device", "step 3/3  loss",
        "in memory: 3 steps", "loss difference", "times the lower bound of",
    ):  # fmt: skip
        assert words in result.output, words
    for name in ("loss.png", "timeline.png", "trace.json", "model.safetensors", "run.json"):
        assert f"wrote {tmp_path / 'out' / name}" in result.output
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-memory", "10GX"], "device_memory: unknown unit 'GX'"),
        (["--device-memory=-5"], "device_memory: cannot read '-5' as a size"),
        (["--device-memory", "100KiB"], "of device memory"),
        (["--host-memory", "nan"], "host_memory: cannot read 'nan'"),
        (["--precision", "fp8"], "precision must be one of"),
        (["--update", "backward", "--max-grad-norm", "1"], "cannot clip exactly"),
        (["--device", "tpu"], "device must be"),
        (["--nvme", "missing-folder"], "missing-folder"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
        (["--model", "lama-8b"], "did you mean 'llama-8b'"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--units", "no.such.module"], "no.such.module"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = call(*small(tmp_path, *arguments))
    assert result.exit_code == 2, result.output
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0], result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "store").iterdir()) == []


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    result = call(*small(tmp_path, "--device-mem", "3MiB"))
    assert result.exit_code == 2
    assert "No such option" in result.output and "--device-mem" in result.output
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = call(*small(tmp_path, "--steps", "0", "--debug"))
    assert isinstance(result.exception, ValueError)


def test_a_rates_file(tmp_path: Path) -> None:
    rest = ["disk_write_bytes_s", "h2d_bytes_s", "d2h_bytes_s", "update_params_s", "device_flops_s"]
    given = {"disk_read_bytes_s": 1e6, **dict.fromkeys(rest, 1e10)}
    (tmp_path / "rates.json").write_text(json.dumps(given))
    common = ["plan", "--model", "gpt2-1m", "--device", "sim", "--device-memory", "3MiB",
              "--host-memory", "6MiB", "--nvme", tmp_path, "--tokens", "64"]  # fmt: skip
    result = call(*common, "--rates", tmp_path / "rates.json")
    assert result.exit_code == 0, result.output
    assert "(read)" in result.output
    (tmp_path / "rates.json").write_text('{"disk_speed": 1}')
    result = call(*common, "--rates", tmp_path / "rates.json")
    assert result.exit_code == 2 and "unknown rate disk_speed" in result.output


def test_plan_shows_where_things_go_and_takes_nothing(tmp_path: Path) -> None:
    result = call("plan", "--model", "gpt2-1m", "--device", "sim", "--device-memory", "3MiB",
                  "--host-memory", "6MiB", "--nvme", tmp_path, "--every-unit",
                  "--tokens", "64")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "transformer.h.3" in result.output and "fits" in result.output
    assert list(tmp_path.iterdir()) == []


def test_plan_of_what_does_not_fit() -> None:
    result = call("plan", "--model", "gpt2-124m", "--device", "sim", "--device-memory", "1MiB",
                  "--host-memory", "1MiB")  # fmt: skip
    assert result.exit_code == 2
    assert "does not fit" in result.output and "raise device_memory" in result.output


def test_a_plan_counts_activations_where_they_are_known(tmp_path: Path) -> None:
    """It says so in the line that says "fits", and ends otherwise when they alone are too much."""
    machine = Path(__file__).parents[2] / "examples" / "machines" / "rtx4090.toml"
    common = ["plan", "--model", "llama-1b", "--precision", "bf16", "--rates", machine]
    said = {}
    for tokens, policy, code in ((0, "auto", 0), (2048, "auto", 0), (65536, "keep", 3)):
        result = call(*common, "--tokens", tokens, "--activations", policy)
        assert result.exit_code == code, result.output
        lines = (line for line in result.output.splitlines() if "activations" in line)
        said[tokens] = next(lines)
    assert said[0].startswith("fits, streams no units, activations (auto) not known yet")
    assert re.match(r"fits, streams [\w ]+(\(\d+% of the weights\))?, about ", said[2048])
    assert "GiB left for them" in said[2048]
    assert said[65536].startswith("does not fit: what autograd keeps until backward")
    figures = json.loads(call(*common, "--tokens", 65536, "--activations", "keep", "--json").output)
    assert figures["fits"] is False and figures["activations_fit"] is False
    figures = json.loads(call(*common, "--tokens", 65536, "--json").output)
    assert figures["fits"] is True, "they may leave"


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overspill", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"overspill {overspill.__version__}"


KEPT_AFTER_FREEING = """
import psutil, torch
from overspill.cli.heap import give_freed_memory_back
assert give_freed_memory_back()
del (large := [torch.ones(24 * 2**18)])[:]  # glibc would now raise its limit above 2 MiB
before = psutil.Process().memory_info().rss
blocks = [torch.ones(2**19) for _ in range(64)]
last = blocks.pop()
blocks.clear()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    """``| head`` closes the pipe: nothing is said of it."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "overspill", "plan", "gpt2-1m", "--device", "sim", "--json",
         "--device-memory", "64MiB", "--host-memory", "64MiB"],
        stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 1 and "error" not in done.stderr, done.stderr


def test_freed_memory_goes_back_to_the_system() -> None:
    code = [sys.executable, "-c", KEPT_AFTER_FREEING]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 * 2**20, "126 MiB of 128 were freed"


# -- progress -------------------------------------------------------------------------------------


def record(step: int) -> StepRecord:
    lanes = dict.fromkeys(LANES, LaneStats()) | {"read": LaneStats(10, 1.0, 0.25)}
    return StepRecord(step, 2.5, 1024, 0.5, 0.9, Stats(0.5, 0.4, lanes))


MEMORY = {"device": MemoryStats(2**20, 2**19, 2**19), "nvme": MemoryStats(2**30, 2**20, 2**20)}


def test_without_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    watch = make_watch(Console(file=out, width=40))
    assert type(watch) is PlainWatch
    watch.begin("offloaded", 500)
    for step in range(1, 501):
        watch.step(record(step), MEMORY)
    watch.end()
    lines = out.getvalue().splitlines()
    assert 45 <= len(lines) <= 60, "about fifty lines for five hundred steps"
    expected = "loss 2.5000  2,048 tokens/s  device 512 KiB  nvme 1 MiB  stalls: read 0.25 s"
    assert lines[1] == f"step 1/500  {expected}"
    assert lines[-1] == f"step 500/500  {expected}"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_panel_is_taken_away_again() -> None:
    out = io.StringIO()
    watch = make_watch(Console(file=out, force_terminal=True, width=100))
    assert type(watch) is LiveWatch
    watch.begin("offloaded", 2)
    watch.step(record(1), MEMORY)
    watch.step(record(2), {})
    watch.end()
    watch.end()
    assert "512 KiB of 1 MiB" in out.getvalue() or "step 2/2" in out.getvalue()
