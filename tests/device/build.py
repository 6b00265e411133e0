"""Builds the test device once for each torch and each state of its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
BUILT = HERE.parents[1] / "build" / "test-device"
NAME = "overspill_test_device"


def build() -> ModuleType:
    """The extension; from ``build/test-device`` if these sources were built there before."""
    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    folder = BUILT / digest.hexdigest()[:16]
    done = folder / "done"
    if not done.exists():
        _compile(files, folder)
        done.touch()
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(files: Sequence[Path], folder: Path) -> None:
    from torch.utils import cpp_extension

    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    # ninja comes with the test extra, beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cpp_extension.load(
        name=NAME,
        is_python_module=False,
        sources=[str(file) for file in files if file.suffix == ".cpp"],
        extra_cflags=["-O1", "-std=c++20", "-Wall", "-Wno-unused-function"],
        build_directory=str(folder),
        verbose=bool(os.environ.get("VERBOSE")),
    )
