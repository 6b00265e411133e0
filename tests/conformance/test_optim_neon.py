"""NEON kernels: compiled for Arm, and run there or in an emulator, they give this machine's bits.

Needs a compiler for Arm (``aarch64-linux-gnu-g++`` or ``zig``) and ``qemu-aarch64``; else skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import WAIT_S

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "csrc" / "cpu"
SOURCES = [HERE / "kernels_agree.cpp", KERNELS / "isa_scalar.cpp", KERNELS / "isa_neon.cpp"]
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-DPORTABLE_ONLY", "-Wno-psabi", f"-I{KERNELS}"]


def found(*names: str) -> str | None:
    return next((path for path in map(shutil.which, names) if path), None)


def build(compiler: list[str], program: Path) -> Path:
    command = [*compiler, *FLAGS, *map(str, SOURCES), "-o", str(program)]
    subprocess.run(command, check=True, timeout=WAIT_S)
    return program


def run(*command: str) -> list[str]:
    """The instruction sets and the checksum."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout
    names, told = done.stdout.splitlines()
    return [*names.split(), told.split()[1]]


@pytest.mark.timeout(300)
def test_neon_gives_the_same_bits(tmp_path: Path) -> None:
    cross, zig = found("aarch64-linux-gnu-g++"), found("zig")
    if found("g++") is None or not (cross or zig):
        pytest.skip("needs g++ and a compiler for Arm")
    compiler = [cross, "-static"] if cross else [str(zig), "c++", "-target", "aarch64-linux-musl"]
    program = build(compiler, tmp_path / "arm")
    emulator = found("qemu-aarch64", "qemu-aarch64-static")
    if emulator is None:
        pytest.skip("compiled; needs qemu-aarch64 to run")
    *there, checksum = run(emulator, str(program))
    assert there == ["scalar", "neon"]
    assert run(str(build(["g++"], tmp_path / "here")))[-1] == checksum
