"""A real system that fails: full, pulled, unmounted, read-only, over quota, limited, deleted.

Mounts are made in a namespace that ends with the process; where that is not allowed the test says
so and is skipped.  The simulated disk covers these errors everywhere.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.io_engine.backend import choose
from overspill.io_engine.errors import remedy_for
from tests.patience import WAIT_S

SCRIPT = Path(__file__).with_name("io_bad_disk.py")
X86 = os.uname().machine == "x86_64"


@pytest.fixture(params=["uring", "threads", "aiofiles"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        choose(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    return str(request.param)


def seen(command: list[str], cwd: Path) -> tuple[dict[str, Any], str]:
    """What a case saw, and what it logged."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def case(name: str, directory: Path, *more: str) -> tuple[dict[str, Any], str]:
    return seen([sys.executable, str(SCRIPT), name, str(directory), *more], directory.parent)


def mounted_case(
    mount: str, name: str, backend: str, tmp_path: Path, *, root: bool = False
) -> tuple[dict[str, Any], str]:
    """A case on the directory ``place``, after the shell command ``mount``."""
    flags = ["-m"] if root else ["-Urm"]
    if root and os.getuid() != 0:
        pytest.skip("only root may mount a disk image")
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1)")
    if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    (tmp_path / "place").mkdir()
    probe = ["unshare", *flags, "sh", "-ec", mount]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False, cwd=tmp_path)
    if tried.returncode:
        pytest.skip(f"cannot mount here: {tried.stderr.strip()}")
    script = f'{mount}; exec "$@"'
    place = tmp_path / "place"
    words = [sys.executable, str(SCRIPT), name, str(place), backend]
    return seen(["unshare", *flags, "sh", "-ec", script, "sh", *words], tmp_path)


def test_a_file_system_that_fills_up(backend: str, tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=8m tmpfs place"
    found, _ = mounted_case(mount, "full", backend, tmp_path)
    assert found["before"] == ["done"] * 4
    assert found["during"] == ["done"] * 2 + ["ENOSPC"] * 2
    assert found["reads"] == ["done"] * 2 + ["CorruptionError"] * 2, (
        "half-written, never handed out"
    )
    assert found["after"] == [True] * 4, "usable again"
    assert found["failures"] == 4 and found["left"] == []


def test_a_disk_that_is_pulled(backend: str, tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    (tmp_path / "image").write_bytes(b"")
    os.truncate(tmp_path / "image", 32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(tmp_path / "image")], check=True)
    found, log = mounted_case("mount -o loop image place", "gone", backend, tmp_path, root=True)
    assert found["before"] == [True] * 4
    assert found["writes"] == ["EIO"] * 4
    assert set(found["reads"]) <= {"EIO", "CorruptionError"}
    assert "cannot flush" in found["flush"] or "deleted" in found["flush"]
    assert "cannot be removed" in log, "what stays behind is said, and close() ends"


def test_a_directory_that_is_unmounted(backend: str, tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=8m tmpfs place"
    found, _ = mounted_case(mount, "unmounted", backend, tmp_path)
    assert found["works"] == [True] * 4 and found["other"] is True
    assert found["left"] == ["overspill.lock", "overspill.store"], "another's store was removed"
    assert found["end"] == []


def test_a_read_only_directory(tmp_path: Path) -> None:
    found, _ = mounted_case("mount -t tmpfs -o ro tmpfs place", "shut", "auto", tmp_path)
    assert len(found["said"]) == 2 and found["left"] == []
    assert all("Read-only file system; " in text for text in found["said"])


@pytest.mark.skipif(not X86, reason="numbers of system calls are those of x86-64")
@pytest.mark.parametrize(  # io_uring makes no calls to refuse
    ("by", "code"),
    [("threads", "EDQUOT"), ("threads", "EROFS"), ("aiofiles", "EDQUOT"), ("aiofiles", "EIO")],
)
def test_calls_that_the_kernel_refuses(by: str, code: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    found, _ = case("refused", place, by, code)
    assert found["before"] == [True] * 4
    assert found["writes"] == [code] * 2 and found["reads"] == [code] * 2
    assert found["others"] == ["done"] * 2, "the rest stays usable"
    remedy = remedy_for(getattr(errno, code))
    assert "cannot create a store here" in found["opening"] and remedy in found["opening"]
    assert found["left"] == []


@pytest.mark.skipif(not X86, reason="numbers of system calls are those of x86-64")
@pytest.mark.parametrize("code", ["EPERM", "EINVAL"])
def test_a_ring_that_takes_nothing_more(code: str, tmp_path: Path) -> None:
    """What was submitted ends, what was only prepared fails, and nobody waits for ever."""
    try:
        choose("uring")
    except RuntimeError as error:
        pytest.skip(str(error))
    place = tmp_path / "place"
    place.mkdir()
    found, _ = case("stuck", place, "uring", code)
    assert found["before"] == [True] * 2
    assert code in found["ended"] and set(found["ended"]) <= {code, "done"}
    assert found["closed_s"] < 25, "it was given up after 30 s"
    assert found["left"] == []


@pytest.mark.parametrize("changing", ["", "changing"])
def test_a_file_size_limit(backend: str, changing: str, tmp_path: Path) -> None:
    """Sixteen blocks of a write, of which those that are copied go two at a time."""
    place = tmp_path / "place"
    place.mkdir()
    found, _ = case("limited", place, backend, changing)
    assert found["writes"] == ["done"] * 2 + ["EFBIG"] * 2
    assert found["reads"] == ["done"] * 2 + ["CorruptionError"] * 2
    assert "2097152" in found["opening"] and "ulimit -f" in found["opening"]
    assert found["left"] == []


def test_a_store_that_is_deleted(backend: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    found, _ = case("deleted", place, backend)
    assert found["works"] == [True] * 4 and "has been deleted" in found["flush"]
    assert found["left"] == ["overspill.lock", "overspill.store"] and found["other"] is True
    assert found["end"] == []
