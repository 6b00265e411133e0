"""``python -m tests.house.dist_check DIST``: the wheel and the sdist of a release, each installed
into an empty environment, from which the demo's command is then run, away from the sources."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = [
    "train", "--model", "gpt2-1m", "--steps", "3", "--batch", "2", "--seq", "64", "--device", "sim",
    "--device-memory", "3MiB", "--host-memory", "16MiB", "--compare",
]  # fmt: skip


def _run(*words: str | Path, where: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=where, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check(package: Path) -> None:
    """Installs one package with what it asks for, and trains.

    Raises:
        SystemExit: something failed; what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        pip = [place / "env/bin/python", "-m", "pip", "install", "-q", "--no-compile"]
        pinned = [*pip, "-c", ROOT / "constraints.txt"]
        _run(*pinned, "torch", where=place)  # as pinned, before anything asks for another
        _run(*pinned, f"overspill[hf,plot] @ {package.resolve().as_uri()}", where=place)
        command = place / "env/bin/overspill"
        store = place / "store"
        store.mkdir()
        told = _run(command, *RUN, "--nvme", store, "--out", place / "out", where=place)
        _run(command, "doctor", "--nvme", store, where=place)
        assert (place / "out" / "run.json").exists() and "loss difference" in told, told
        where = "import overspill.io_engine._native as n, overspill; print(n.__file__)"
        module = _run(place / "env/bin/python", "-c", where, where=place)
        print(f"{package.name}: trained; {Path(module.strip()).name}")


def main() -> None:
    packages = sorted(Path(sys.argv[1]).glob("overspill-*"))
    assert len(packages) == 2, f"expected a wheel and an sdist, found {packages}"
    for package in packages:
        check(package)


if __name__ == "__main__":
    main()
