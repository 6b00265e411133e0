"""The table of docs/durability.md: who may make, cut, replace or remove which file, and under which
lock.  What is in it happens, and nothing else does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.devices import about_files

pytestmark = about_files

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `(?P<file>[^`]+)` \| (?P<what>\w+) \| [^|]+ \| (?P<lock>[^|]+) \|")


def table() -> set[tuple[str, str, str]]:
    text = (ROOT / "docs" / "durability.md").read_text()
    return {(m["file"], m["what"], m["lock"].strip()) for m in ROW.finditer(text)}


def test_files_change_as_the_table_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.durable.file_cases", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    held: dict[tuple[str, str], set[str]] = {}
    for file, what, lock in json.loads(done.stdout.splitlines()[-1]):
        held.setdefault((file, what), set()).add(lock)
    for locks in held.values():
        if len(locks) > 1:
            locks.discard("all of the store's")  # more than what the table asks for
    seen = {(*key, lock) for key, locks in held.items() for lock in locks}
    assert len(table()) > 10
    assert seen == table()
