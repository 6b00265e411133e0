"""Builds the C++ side of the I/O engine with ThreadSanitizer and AddressSanitizer, and loads it.

``python -m tests.sim.sanitize_io [--seconds 2] [--seed 0]``; ends with 1 at the first report.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.patience import WAIT_S

ROOT = Path(__file__).parents[2]
SANITIZERS = ("thread", "address,undefined")


def build(sanitizer: str, folder: Path) -> Path:
    """The stress program, built with ``sanitizer``."""
    sources = [
        str(path) for path in sorted((ROOT / "csrc/io").glob("*.cpp")) if path.stem != "bindings"
    ]
    program = folder / f"io_stress_{sanitizer.replace(',', '_')}"
    subprocess.run(
        [
            *os.environ.get("CXX", "g++").split(), "-std=c++17", "-O1", "-g", "-pthread",
            f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all",
            f"-I{ROOT / 'csrc/io'}", f"-I{ROOT / 'tests/faults'}", *sources,
            str(ROOT / "tests/faults/faulty.cpp"), str(ROOT / "tests/sim/io_stress.cpp"),
            "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    return program


def main() -> int:
    """Runs the stress program under every sanitizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each backend")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    with tempfile.TemporaryDirectory() as name:
        for sanitizer in SANITIZERS:
            print(f"-fsanitize={sanitizer}, seed {given.seed}", flush=True)
            program = build(sanitizer, Path(name))
            done = subprocess.run(
                [str(program), name, str(given.seconds), str(given.seed)],
                env={**os.environ, **options},
                check=False,
                timeout=WAIT_S + 30 * given.seconds,
            )
            if done.returncode != 0:
                print(f"-fsanitize={sanitizer}: failed ({done.returncode})", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
