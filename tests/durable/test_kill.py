"""A run that is ended at any instant opens at a committed step, and ends with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import about_forks

pytestmark = about_forks


def play(folder: Path, cases: int, seed: int, seconds: float) -> None:
    """The cases run in a program of their own, which forks: this process has threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.durable.kill_cases", str(folder), str(cases), str(seed)],
        capture_output=True, text=True, timeout=seconds, check=False, env=os.environ,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{cases} cases passed" in done.stdout


@pytest.mark.timeout(900)
def test_killed_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    """SIGKILL, Ctrl-C and SIGTERM at random instants, in every way to update, also with the last
    writes dropped or torn by a power cut; a short form of the soak below."""
    play(tmp_path, 2, 1, 850)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_killed_runs(tmp_path: Path) -> None:
    """As above, 200 times."""
    play(tmp_path, 200, 2, 3600)
