"""Builds the test device once for each torch and each state of its sources."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).with_name("csrc")
BUILT = Path(__file__).resolve().parents[2] / "build" / "test-device"


def build() -> ModuleType:
    """The extension; from ``build/test-device`` if these sources were built there before."""
    from torch.utils import cpp_extension

    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    folder = BUILT / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    # ninja comes with the test extra, beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return cpp_extension.load(
        name="overspill_test_device",
        sources=[str(file) for file in files if file.suffix == ".cpp"],
        extra_cflags=["-O1", "-std=c++20", "-Wall", "-Wno-unused-function"],
        build_directory=str(folder),
        verbose=bool(os.environ.get("VERBOSE")),
    )
