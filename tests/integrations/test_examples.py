"""The scripts that docs show run as they are, and learn."""

from __future__ import annotations

import gc
import importlib
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import about_sim

pytestmark = [about_sim, pytest.mark.filterwarnings("ignore::UserWarning")]
EXAMPLES = Path(__file__).parents[2] / "examples"
# What lies in the folder that a script is given; those that want none have none.
LEFT = {
    "trainer": "checkpoint-10/optimizer.pt", "sft_lora": "adapter/adapter_model.safetensors",
    "dpo": "model/model.safetensors", "vision": "", "whisper": "",
    "flux_lora": "pytorch_lora_weights.safetensors", "qwen2_vl": "",
    "wan_lora": "pytorch_lora_weights.safetensors", "kohya_network": "lora.safetensors",
    "text_to_image": "averaged/model.safetensors",
    "accelerate_loop": "checkpoint/model.safetensors",
    "lightning_fit": "checkpoints/epoch=1-step=32.ckpt",
    "quantised_base": "merged/model.safetensors",
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--steps=10"] if name == "trainer" else []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tmp_path), *few])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    gc.collect()
    assert not LEFT[name] or (tmp_path / LEFT[name]).stat().st_size > 1 << 10
    told = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r"[^_]loss(?:'?: ?'|  ?)(\d+\.\d+)", told)]
    assert losses, told
    assert losses[-1] < (4.0 if name == "lightning_fit" else losses[0]), losses


@pytest.mark.parametrize("name", ["finetune", "two_gpus"])
def test_a_loop_with_weights_from_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    words = importlib.import_module("words")
    words.model().save_pretrained(tmp_path / "model")
    words.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("\n".join(words.sources(2)))
    (tmp_path / "store").mkdir()
    given = [tmp_path / "model", tmp_path / "notes.txt", tmp_path / "store"]
    options = ["--host-memory=16MiB", "--steps=4", "--seq=64"]
    if name == "two_gpus":
        be_one_rank(monkeypatch)
    else:
        options.append("--device=cpu")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, given), *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    gc.collect()
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[-1] < 8
    assert (tmp_path / "finetuned/model.safetensors").stat().st_size > 1 << 20


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("generate", "the very tokens of the model in memory"),
        ("resume_after_kill", "the very weights of a run that nobody has killed"),
        ("long_context", r"[1-9]\d* MiB left the device"),
    ],
)
def test_scripts_that_say_what_holds(name: str, told: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(told, done.stdout), done.stdout
    if name == "resume_after_kill":
        assert "killed\nresumed at step 6\nstep 7\n" in done.stdout, done.stdout
    if name == "long_context":
        used, budget = map(int, re.findall(r"device: at most (\d+) of (\d+)", done.stdout)[0])
        assert used <= budget


def be_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells a process, of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in {**told, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))


def test_all_of_them_are_run() -> None:
    there = {path.stem for path in EXAMPLES.glob("*.py")}
    shown = {"generate", "resume_after_kill", "long_context"}
    assert there == {*LEFT, *shown, "words", "finetune", "two_gpus"}
