"""Runs the whole matrix and writes its table into the docs: ``python -m tests.families.page``.

Seven minutes on two cores; on the test device too, where there is a C++ compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from tests.families.test_families import ALL

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"


def run(device: str, out: Path) -> dict[str, Counter[str]]:
    """By family, how many cases ended how."""
    report = out / f"{device or 'cpu'}.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "soak or not soak", "-k",
         "test_a_family", "tests/families", f"--junit-xml={report}"],
        cwd=ROOT, env={**os.environ, "OVERSPILL_TEST_DEVICE": device, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    found = {name: Counter[str]() for name in ALL}
    for case in ET.parse(report).iter("testcase"):
        name = case.attrib["name"].partition("[")[2].partition("-tight")[0].partition("-ample")[0]
        failed = case.find("failure") is not None or case.find("error") is not None
        ended = "failed" if failed else "passed" if case.find("skipped") is None else "skipped"
        found[name][ended] += 1
    return found


def told(ends: Counter[str]) -> str:
    if ends["failed"]:
        return f"{ends['passed']} of {ends['passed'] + ends['failed']}"
    return str(ends["passed"]) if ends["passed"] else "-"


def table(runs: dict[str, dict[str, Counter[str]]]) -> str:
    columns = ["model", *runs, "checkpointing", "generates text"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name, family in ALL.items():
        cells = [f"{name}: `{family.model}`", *(told(found[name]) for found in runs.values())]
        cells += ["yes" if flag else "-" for flag in (family.recomputes, family.generates)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        runs = {"cases on the CPU and the simulated device": run("", Path(out))}
        if shutil.which(os.environ.get("CXX", "c++")):
            runs["on the test device"] = run("testdev", Path(out))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(runs)}{END}{after}")


if __name__ == "__main__":
    main()
