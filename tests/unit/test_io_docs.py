"""The example of docs/disk.md runs as it stands, but for its directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "disk.md"


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "/scratch/a" in code
    code = code.replace("/scratch/a", str(tmp_path)).replace("1 << 30", "32 << 20")
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == f"{16 << 20} {16 << 20}\n"
    assert list(tmp_path.iterdir()) == []
