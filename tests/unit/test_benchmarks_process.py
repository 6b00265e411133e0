"""Arms in processes of their own: none of them can hang a suite, and all of it ends with them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import process
from benchmarks.process import Process
from tests.patience import WAIT_S

# Answers once, then starts a process and never answers again.
STUCK = """
import json, subprocess, sys, time
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"child": child.pid}), flush=True)
time.sleep(600)
"""

# Answers with its environment.
TELLS = """
import json, os, sys
sys.stdin.readline()
print(json.dumps(dict(os.environ)), flush=True)
"""

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an arm of this source, by the name ``arm``."""

    def started(source: str, **options: Any) -> Process:
        folder = tmp_path / "benchmarks"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "arm.py").write_text(source)
        monkeypatch.setattr(process, "ROOT", tmp_path)
        monkeypatch.setenv("PYTHONPATH", "")
        return Process("arm", **options)

    return started


@pytest.fixture
def stuck(start: Start) -> Process:
    return start(STUCK)


def test_a_process_that_does_not_answer_is_ended_with_all_it_started(stuck: Process) -> None:
    child = psutil.Process(stuck.ask({}, 20)["child"])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"its process was ended: no answer after 0 s"):
        stuck.ask({}, 0.3)
    assert time.monotonic() - started < WAIT_S  # it sleeps for ever
    gone, alive = psutil.wait_procs([child], timeout=WAIT_S)
    assert gone or alive[0].status() == psutil.STATUS_ZOMBIE
    stuck.close()


def test_whoever_waits_is_told_why_it_was_ended(stuck: Process) -> None:
    stuck.ask({}, 20)
    stuck.kill("the time was up")
    with pytest.raises(RuntimeError, match="the time was up"):
        stuck.ask({}, 20)
    stuck.close()


def test_peak_memory_is_that_of_the_arm_alone() -> None:
    """Not of the process that started it, which is larger."""
    held = bytearray(b"1" * (1 << 30))
    spec = {
        "shape": {"layers": 1, "width": 32, "heads": 2, "vocabulary": 8, "batch": 1, "tokens": 4}
    }
    arm = Process("worker")
    arm.ask({**spec, "precision": "fp32", "device": "cpu", "engine": "torch", "options": {}}, 60)
    assert arm.ask({"steps": 1}, 60)["peak_rss_bytes"] < len(held)
    arm.close()


def test_an_arm_that_is_ended_says_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    shape = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 8, "batch": 1, "tokens": 4}
    arm = Process("worker")
    given = {"shape": shape, "precision": "fp32", "device": "cpu", "engine": "torch"}
    arm.ask({**given, "options": {}}, WAIT_S)
    with pytest.raises(RuntimeError, match="no answer after 1 s"):
        arm.ask({"steps": 10**9}, 1.0)
    arm.close()
    told = capfd.readouterr().err
    assert "benchmarks/worker.py" in told and "in timed" in told


def test_an_error_is_an_answer() -> None:
    arm = Process("worker")
    with pytest.raises(RuntimeError, match="KeyError: 'shape'"):
        arm.ask({}, 60)
    arm.close()


def test_a_peer_runs_in_its_own_environment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "python_of", lambda name: Path(sys.executable))
    monkeypatch.setattr(process, "environment_of", lambda python: {"ONLY": "this"})
    arm = start(TELLS, peer="torchao")
    environment = arm.ask({}, WAIT_S)
    assert environment["ONLY"] == "this" and "PYTHONPATH" not in environment
    arm.close()
