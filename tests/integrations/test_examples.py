"""The scripts that docs show run as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.devices import about_sim

ROOT = Path(__file__).parents[2]


@about_sim
def test_the_trainers_script(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples/trainer.py"),
        str(tmp_path / "out"),
        "--steps=10",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    state = json.loads((tmp_path / "out/checkpoint-10/trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses[-1] < losses[0] < 6
    assert (tmp_path / "out/model/model.safetensors").stat().st_size > 1 << 20
