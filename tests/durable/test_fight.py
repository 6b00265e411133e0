"""Two processes want one store: no commit that anybody was told of is ever lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import about_forks

pytestmark = about_forks


def play(folder: Path, cases: int, seed: int, seconds: float, *more: str) -> None:
    """The fights take place in a program of their own, which forks: this process has threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.durable.fight_cases", str(folder), str(cases), str(seed),
         *more],
        capture_output=True, text=True, timeout=seconds, check=False, env=os.environ,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{cases} cases passed" in done.stdout


@pytest.mark.timeout(900)
def test_what_was_committed_is_never_lost(tmp_path: Path) -> None:
    """They wrap, resume, export, inspect and are killed; a short form of the soak below."""
    play(tmp_path, 1, 1, 850, "1")  # step


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_fights(tmp_path: Path) -> None:
    """As above, 100 times."""
    play(tmp_path, 100, 2, 7200)
