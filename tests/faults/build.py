"""Builds the I/O engine's own sources over the disk that makes mistakes: an extension for tests
alone, made once for each state of its sources."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "overspill_faulty_disk"


@functools.cache
def build() -> ModuleType:
    """The extension, from ``build/faulty-disk`` if these sources were built there before.

    Raises:
        RuntimeError: it cannot be built here.
    """
    files = sorted([*(ROOT / "csrc/io").iterdir(), *HERE.glob("faulty.*"), HERE / "bindings.cpp"])
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    folder = ROOT / "build/faulty-disk"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{digest.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes that test, one builds
        if not made.exists():
            _compile([file for file in files if _is_source(file)], made)
    spec = importlib.util.spec_from_file_location(NAME, made)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_source(file: Path) -> bool:
    return file.suffix == ".cpp" and file != ROOT / "csrc/io/bindings.cpp"


def _compile(sources: list[Path], made: Path) -> None:
    try:
        import nanobind
    except ImportError as error:
        raise RuntimeError("nanobind is not there; pip install nanobind") from error
    draft = made.with_suffix(".draft")
    macros = {
        "Py_LIMITED_API": "0x030A0000",
        "NB_BACKEND_MODULE": "nanobind_backend",
        "NB_BACKEND_PYPI": "nanobind-backend",
        # nanobind knows types by their names: these are not those of the engine's extension.
        "overspill": "overspill_faulty",
    }
    includes = [ROOT / "csrc/io", HERE, nanobind.include_dir(), sysconfig.get_path("include")]
    done = subprocess.run(
        [
            *os.environ.get("CXX", "g++").split(), "-std=c++17", "-O1", "-fPIC", "-shared",
            "-fvisibility=hidden", "-pthread", *(f"-D{k}={v}" for k, v in macros.items()),
            *(f"-I{folder}" for folder in includes), *map(str, sources), "-o", str(draft),
        ],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the faulty disk does not compile:\n{done.stderr[-4000:]}")
    draft.replace(made)
