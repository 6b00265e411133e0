"""Environments of the peers: each has its own, from a pinned requirements file beside this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
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


def _pip(python: Path | str, *words: str) -> None:
    command = [str(python), "-m", "pip", *words, "-q", "--disable-pip-version-check"]
    subprocess.run(command, check=True)


def _pinned(name: str) -> list[str]:
    """All that a peer needs beside torch, which the machine has."""
    lines = [*BASE.read_text().splitlines(), *(HERE / f"{name}.txt").read_text().splitlines()]
    return [line for line in lines if "==" in line and not line.startswith("torch==")]


def install(name: str, wheels: Path | None = None) -> Path:
    """Makes the environment of a peer, or completes it; returns its folder.

    ``wheels``: a folder that ``carry`` has filled, for a machine without network; torch is then
    that of this interpreter.

    Raises:
        subprocess.CalledProcessError: a step failed; what it printed was shown.
    """
    there = folder() / name
    python = there / "bin" / "python"
    if not python.exists():
        there.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(there)], check=True)
    if wheels is not None:
        _share_packages(there)
        words = ["--no-index", "--find-links", str(wheels), "--no-deps"]
        _pip(python, "install", *words, *_pinned(name))
        return there
    _pip(python, "install", "-r", str(BASE))
    # With isolation pip would build it in an environment with a torch of its own choice.
    _pip(
        python, "install", "--no-build-isolation", "-c", str(BASE), "-r", str(HERE / f"{name}.txt")
    )
    return there


def _share_packages(there: Path) -> None:
    """Has an environment find what this interpreter finds, after its own packages.

    ``--system-site-packages`` would not do: where this interpreter's is itself an environment, it
    gives those of the interpreter behind it.
    """
    places = {"base": str(there), "platbase": str(there)}
    own = Path(sysconfig.get_path("purelib", "posix_prefix", places))
    own.mkdir(parents=True, exist_ok=True)
    found = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "shared.pth").write_text("\n".join([*found, ""]), encoding="utf-8")


def carry(name: str, wheels: Path, version: str) -> None:
    """Puts what ``install`` needs into ``wheels``, for a machine with Python ``version``.

    What is only there as source is built in the peer's environment, which must be installed.

    Raises:
        RuntimeError: it is not.
        subprocess.CalledProcessError: a step failed; what it printed was shown.
    """
    python = python_of(name)
    wheels.mkdir(parents=True, exist_ok=True)
    target = ["--no-deps", "--only-binary=:all:", "--python-version", version]
    for package in _pinned(name):
        try:
            _pip(python, "download", *target, "-d", str(wheels), package)
        except subprocess.CalledProcessError:
            print(f"{package}: no wheel; building one", flush=True)
            built = ["--no-deps", "--no-build-isolation", "-w", str(wheels)]
            _pip(python, "wheel", *built, package)
