"""The package as others get it: pure without a compiler, complete as sdist, never half built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("csrc", "io_engine", "offload", "optim")
FILES = (
    "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
    "constraints.txt",
)  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, apart from the checkout, so that a build leaves nothing in it."""
    target = tmp_path / "source"
    target.mkdir()
    for part in PARTS:
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / part, target / part, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return target


def build(source: Path, kind: str, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Calls the build backend as pip does."""
    call = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    return subprocess.run(
        [sys.executable, "-c", call],
        cwd=source, env={**os.environ, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_without_a_compiler_an_honest_pure_wheel(copy: Path, tmp_path: Path) -> None:
    done = build(copy, "wheel", tmp_path, CXX="false", OVERSPILL_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")]
    for wanted in (
        "overspill/__init__.py", "overspill/optim/__init__.py", "overspill/io_engine/__init__.py",
        "overspill/movement/accelerators/sim.py", "overspill/schedule/residency.py",
        "overspill/cli/__init__.py", "overspill/py.typed", "overspill/cuda_sources/adam.cu",
    ):  # fmt: skip
        assert wanted in names, wanted
    ours = {
        f"overspill/{path.relative_to(ROOT / 'offload')}"
        for path in (ROOT / "offload").rglob("*.py")
    }
    assert ours <= set(names), "a room is missing from ROOMS in setup.py"


def test_a_compiler_that_is_demanded_must_be_there(copy: Path, tmp_path: Path) -> None:
    done = build(copy, "wheel", tmp_path, CXX="false", OVERSPILL_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "no working C++ compiler was found" in done.stderr


def test_a_compile_error_of_ours_is_fatal(copy: Path, tmp_path: Path) -> None:
    for folder in ("io", "cpu"):
        for source in (copy / "csrc" / folder).glob("*.cpp"):
            source.write_text("this does not compile\n")
    done = build(copy, "wheel", tmp_path)
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))


def test_sdist_has_all_that_a_build_needs(copy: Path, tmp_path: Path) -> None:
    done = build(copy, "sdist", tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    for part in PARTS:
        for path in (copy / part).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(copy)) in names, path
    assert {"setup.py", "pyproject.toml", "LICENSE", "constraints.txt"} <= names


def test_one_version(copy: Path, tmp_path: Path) -> None:
    """It stands in ``offload/__init__.py`` alone; what is cited and told of changes is that one."""
    import overspill

    init = copy / "offload" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{overspill.__version__}"', '"7.8.9"'))
    done = build(copy, "wheel", tmp_path, CXX="false", OVERSPILL_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("overspill-7.8.9-")
    assert f"version: {overspill.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{overspill.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
