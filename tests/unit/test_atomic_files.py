"""Files and folders that appear complete or not at all: the order of calls, errors, leftovers."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overspill.errors import IoError, OffloadError
from overspill.io_engine import atomic_files
from overspill.io_engine.atomic_files import (
    make_folder,
    remove_abandoned,
    replacing,
    replacing_folder,
    write_bytes,
    write_text,
)
from tests.folders import fill, names

HEX = "0123456789abcdef" * 2


class Calls:
    """Notes flushes and renames, with the names that they are of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)
        for name in ("replace", "rename", "unlink"):
            monkeypatch.setattr(os, name, self._noted(name, getattr(os, name)))

    def _sync(self, fd: int) -> None:
        self.seen.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        self._fsync(fd)

    def _noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*paths: Any, **more: Any) -> Any:
            self.seen.append(f"{name} {Path(paths[-1]).name}")
            return real(*paths, **more)

        return call


def test_a_file_is_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its folder after that: else a power cut leaves the name without the contents."""
    calls = Calls(monkeypatch)
    write_text(tmp_path / "a.json", "{}")
    assert calls.seen == ["fsync a.json", "replace a.json", f"fsync {tmp_path.name}"]


def test_a_folder_is_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    with replacing_folder(tmp_path / "out") as draft:
        (draft / "inner").mkdir()
        (draft / "inner" / "b").write_text("b")
        (draft / "a").write_text("a")
    assert calls.seen[-2:] == ["rename out", f"fsync {tmp_path.name}"]
    assert {f"fsync {name}" for name in ("a", "b", "inner", "out")} == set(calls.seen[:-2])


def test_until_the_end_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as draft:
        assert draft.name == "a", "torch and matplotlib go by the name"
        draft.write_text("new")
        assert path.read_text() == "old"
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["a"]
    with replacing(path) as draft:
        draft.write_text("new")
    assert path.read_text() == "new" and names(tmp_path) == ["a"]


def test_permissions_are_kept(tmp_path: Path) -> None:
    write_text(tmp_path / "new", "")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask
    (tmp_path / "new").chmod(0o640)
    write_text(tmp_path / "new", "again")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a").symlink_to(tmp_path / "precious")
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_text() == "new"


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    before = os.stat("/dev/null")
    write_bytes("/dev/null", b"gone")
    assert os.path.samestat(before, os.stat("/dev/null"))
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(tmp_path / "pipe", b"through")
    assert os.read(fd, 100) == b"through"
    os.close(fd)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(IoError, match="is not a regular file"), replacing(tmp_path / "pipe"):
        pass


def test_what_cannot_be_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "none" / "a", f"{tmp_path / 'none'} does not exist; create it"),
        (tmp_path / "file" / "a", f"{tmp_path / 'file'} is not a folder"),
    ):
        with pytest.raises(IoError, match=words) as caught, replacing(path):
            raise AssertionError("the block must not begin")
        assert caught.value.path == str(path)
    with (
        pytest.raises(IoError, match="file: is not a folder; name another one"),
        replacing_folder(tmp_path / "file"),
    ):
        raise AssertionError("the block must not begin")
    for path in (tmp_path / "file", tmp_path / "file" / "deep" / "er"):
        with pytest.raises(IoError, match=f"{tmp_path / 'file'}: is not a folder"):
            make_folder(path)
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_errors_name_the_target_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    (tmp_path / "a").write_text("old")

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(IoError) as caught:
        write_text(tmp_path / "a", "new")
    words = str(caught.value)
    assert words.startswith(f"{tmp_path / 'a'}: cannot write: {os.strerror(code)}; ")
    assert caught.value.errno == code and caught.value.path == str(tmp_path / "a")
    assert ".part" not in words
    assert ("are free in" in words) == (code == errno.ENOSPC)
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_errors_of_others_are_theirs(tmp_path: Path) -> None:
    """What the block raises about something else is not about the target."""
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a"):
        (tmp_path / "missing").read_text()
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(OffloadError, match="mine"), replacing(tmp_path / "a"):
        raise OffloadError("mine")
    with pytest.raises(RuntimeError, match="torch's"), replacing(tmp_path / "a"):
        raise RuntimeError("torch's")
    assert names(tmp_path) == []


def test_a_librarys_own_error_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer says nothing of the disk, and safetensors nothing of the file."""
    monkeypatch.setattr(atomic_files, "FULL_BYTES", 1 << 62)
    with (
        pytest.raises(IoError, match=r"a: cannot write: No space left.*free.*\(unexpected pos 5\)"),
        replacing(tmp_path / "a"),
    ):
        raise RuntimeError("unexpected pos 5\nmore")


# -- what killed writers leave ---------------------------------------------------------------------


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    dead, alive, other = (
        tmp_path / f".{name}.{HEX[::step]}.part" for name, step in (("a", 1), ("a", -1), ("b", 1))
    )
    for folder in (dead, alive):
        fill(folder, "half", "a")
    fill(other, "half", "b")
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    write_text(tmp_path / "a", "new")
    assert names(tmp_path) == sorted([alive.name, other.name, "a"])
    os.close(fd)
    remove_abandoned(tmp_path, "[ab]")
    assert names(tmp_path) == ["a"]


def test_what_only_has_such_a_name_stays(tmp_path: Path) -> None:
    thesis = tmp_path / f".a.{HEX}.part"
    fill(thesis, "mine", "thesis")
    (tmp_path / f".a.{HEX[::-1]}.part").symlink_to(thesis)
    (tmp_path / f".a.{HEX[1:]}0.part").write_text("a file")
    before = names(tmp_path)
    write_text(tmp_path / "a", "new")
    assert names(tmp_path) == sorted([*before, "a"])
    assert (thesis / "thesis").read_text() == "mine"


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    """The last one to end wins; neither touches the other's draft."""
    with replacing(tmp_path / "a") as one:
        one.write_text("one")
        with replacing(tmp_path / "a") as two:
            two.write_text("two")
        assert (tmp_path / "a").read_text() == "two"
    assert (tmp_path / "a").read_text() == "one" and names(tmp_path) == ["a"]


def test_a_draft_that_is_taken_for_abandoned_at_birth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock another writer may remove it: then there is another."""
    flock, removed = fcntl.flock, []

    def remove_first(fd: int, how: int) -> None:
        if not removed and how == fcntl.LOCK_EX:
            (draft,) = tmp_path.iterdir()
            draft.rmdir()
            removed.append(draft)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    write_text(tmp_path / "a", "new")
    assert removed and names(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127])
def test_long_names(tmp_path: Path, name: str) -> None:
    for _ in range(2):
        write_text(tmp_path / name, "text")
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("error", [
    ConnectionError("no network"), TimeoutError("late"), OSError("an invalid generation config"),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
])  # fmt: skip
def test_errors_that_are_not_of_disks_are_raised_as_they_are(
    error: OSError, tmp_path: Path
) -> None:
    with pytest.raises(type(error)) as caught, replacing(tmp_path / "a"):
        raise error
    assert caught.value is error
    assert names(tmp_path) == []


def test_names_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    with pytest.raises(IoError, match="File name too long"):
        write_text(tmp_path / ("x" * 300), "")
    with (
        pytest.raises(IoError, match="File name too long"),
        replacing_folder(tmp_path / ("x" * 300)),
    ):
        pass
    for name in ("loop", "nowhere"):
        with pytest.raises(IoError, match="is not a folder"), replacing_folder(tmp_path / name):
            pass
    assert names(tmp_path) == ["loop", "nowhere"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_memory_file_systems_hold_files() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for text in ("one", "two"):
            with replacing(Path(folder, "a")) as draft:
                draft.write_text(text)
        assert Path(folder, "a").read_text() == "two"
