"""Environments of peers: found by name, and what is missing says how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import peers


def test_every_peer_is_pinned() -> None:
    assert {"deepspeed", "torchao", "bitsandbytes"} <= set(peers.known())
    for file in peers.HERE.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines and all("==" in line for line in lines), file.name


def test_a_missing_peer_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_PEERS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"benchmarks\.peers install deepspeed") as caught:
        peers.python_of("deepspeed")
    assert str(tmp_path / "deepspeed") in str(caught.value)


def test_a_peer_sees_its_own_tools_and_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    python = tmp_path / "bin" / "python"
    environment = peers.environment_of(python)
    assert "PYTHONPATH" not in environment
    assert environment["PATH"].startswith(f"{python.parent}:")


def test_an_unknown_peer_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "install", "nobody"],
        cwd=peers.HERE.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "unknown: nobody; there are bitsandbytes" in done.stderr


def test_what_is_carried_is_all_but_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Peers' wheels are carried to a machine without network, which has its own torch, wherever the
    interpreter has it from."""
    installed: list[str] = []
    monkeypatch.setenv("OVERSPILL_PEERS", str(tmp_path))
    monkeypatch.setattr(peers, "_pip", lambda python, *words: installed.extend(words))
    there = peers.install("deepspeed", wheels=tmp_path / "wheels")
    assert {"--no-index", "--no-deps"} <= set(installed)
    assert any(word.startswith("deepspeed==") for word in installed)
    assert not any(word.startswith("torch==") for word in installed)
    told = "import torch, sys; print(torch.__file__, sys.prefix, sep='\\n')"
    done = subprocess.run(
        [there / "bin" / "python", "-c", told], capture_output=True, text=True, check=True,
        env=peers.environment_of(there / "bin" / "python"),
    )  # fmt: skip
    assert done.stdout.splitlines() == [torch.__file__, str(there)]


def test_nothing_is_carried_without_a_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "carry", "torchao"],
        cwd=peers.HERE.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--wheels DIR" in done.stderr
