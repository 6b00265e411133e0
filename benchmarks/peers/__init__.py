"""Environments of the peers: each has its own, from a pinned requirements file beside this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# What each of them needs first: torch, so that no other one is pulled in; and, as DeepSpeed's
# sources ask for it while they are installed, what builds them.
BASE = HERE / "base.txt"


def folder() -> Path:
    """``$OVERSPILL_PEERS``, else a folder in the user's cache."""
    cache = Path.home() / ".cache" / "overspill" / "peers"
    return Path(os.environ.get("OVERSPILL_PEERS") or cache)


def known() -> list[str]:
    """Names of the peers that can be installed."""
    return sorted(file.stem for file in HERE.glob("*.txt") if file != BASE)


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment.

    Raises:
        RuntimeError: it is not installed; the command that installs it.
    """
    python = folder() / name / "bin" / "python"
    if not python.exists():
        raise RuntimeError(
            f"not in {python.parent.parent}; python -m benchmarks.peers install {name}"
        )
    return python


def environment_of(python: Path) -> dict[str, str]:
    """Environment variables for a process of a peer: its tools first, nothing of ours on its path.

    Extensions are compiled on first use and kept beside the environment.
    """
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    # Not torch's common folder, where the lock of a killed build blocks every later one.
    environment["TORCH_EXTENSIONS_DIR"] = str(python.parents[1] / "extensions")
    return environment


def install(name: str) -> Path:
    """Makes the environment of a peer, or completes it; returns its folder.

    Raises:
        subprocess.CalledProcessError: a step failed; what it printed was shown.
    """
    there = folder() / name
    if not (there / "bin" / "python").exists():
        there.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(there)], check=True)
    python = str(there / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(BASE)], check=True)
    # With isolation pip would build it in an environment with a torch of its own choice.
    pinned = ["--no-build-isolation", "-c", str(BASE), "-r", str(HERE / f"{name}.txt")]
    subprocess.run([*pip, *pinned], check=True)
    return there
