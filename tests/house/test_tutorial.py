"""The tutorial, word for word: each block in turn, with fewer steps for the base model."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.devices import about_cpu
from tests.tidy.sources import ROOT

BLOCK = re.compile(r"^```(sh|py)\n(.*?)^```$", re.S | re.M)


@about_cpu
def test_the_tutorial(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    found = BLOCK.findall(page)
    (script,) = [code for language, code in found if language == "py"]
    install, base, kill, inspect, resume, generate = [
        c for language, c in found if language == "sh"
    ]
    assert install == "make venv\n. .venv/bin/activate\noverspill doctor\n"
    (tmp_path / "tune.py").write_text(script, encoding="utf-8")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    bin_ = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(code: str, *exit_codes: int) -> str:
        done = subprocess.run(
            ["bash", "-ec", code], cwd=tmp_path, env=environment, timeout=300, text=True,
            capture_output=True,
        )  # fmt: skip
        assert done.returncode in (exit_codes or (0,)), done.stdout + done.stderr
        assert "budget leaves" not in done.stderr, done.stderr
        return done.stdout

    assert "wrote runs/base/report.html" in run(base.replace("--steps 200", "--steps 20"))
    until = run(kill, 137, -signal.SIGKILL)
    assert "step 30 " in until and "step 31 " not in until
    assert "all checksums of the last commit match" in run(inspect)
    rest = run(resume)
    first = int(re.findall(r"step (\d+) ", rest)[0])
    assert 29 <= first <= 31 and "step 60 " in rest and "times the bound" in rest
    made = run(generate)
    assert "export of step 60" in made and "all checksums match" in made
    text = made.partition("all checksums match\n")[2]
    assert len(text) > 40 and text.isascii(), "64 tokens, each a byte"
