"""Whatever kills a writer, and wherever: its target is the old content, the new one, or absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import about_files, about_forks
from tests.durable.full_disk_cases import EARLIER
from tests.durable.writers import WRITERS
from tests.faults.killing import can_trace

pytestmark = [about_files, about_forks]
ROOT = Path(__file__).parents[2]
LIGHT = [name for name, writer in WRITERS.items() if not writer.slow]
SLOW = [name for name, writer in WRITERS.items() if writer.slow]
WITH_SPACE = [name for name in WRITERS if name not in EARLIER]


def killed(folder: Path, kills: int, names: list[str]) -> list[str]:
    if not can_trace():
        pytest.skip("this system lets no process trace its children")
    words = [sys.executable, "-m", "tests.durable.writer_cases", str(folder), str(kills), "0"]
    done = subprocess.run(
        [*words, *names], capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [line for line in done.stdout.splitlines() if " kills: " in line]


@pytest.mark.timeout(900)
def test_a_killed_writer_leaves_old_or_new(tmp_path: Path) -> None:
    """Some of them; the soak below kills all."""
    names = [*LIGHT[::6], SLOW[0]]
    assert len(killed(tmp_path, 1, names)) == len(names)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_writers_killed_often(tmp_path: Path) -> None:
    assert len(killed(tmp_path, 12, list(WRITERS))) == len(WRITERS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [WITH_SPACE[::5], pytest.param(WITH_SPACE, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_a_full_disk_is_named_and_leaves_the_old(names: list[str], tmp_path: Path) -> None:
    """Writers on a disk without a byte that is free."""
    words = ["unshare", "-rm"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*words, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no mount namespaces here")
    words += [sys.executable, "-m", "tests.durable.full_disk_cases", str(tmp_path), *names]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("No space left on device") > len(names) / 2, done.stdout
