"""Folders that are replaced: in one step, file by file, cut short, and by two writers at once."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from overspill.errors import IoError
from overspill.io_engine import atomic_files
from overspill.io_engine.atomic_files import replacing_folder
from tests.folders import fill, names


def is_part(name: str) -> bool:
    return name in ("index", "one", "two", "three")


def test_a_folder_is_exchanged_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "old", "index", "one", "three")
    before = out.stat().st_ino
    with replacing_folder(out, is_part=is_part) as draft:
        fill(draft, "new", "index", "one", "two")
    assert names(out) == ["index", "one", "two"] and out.stat().st_ino != before
    assert {each.read_text() for each in out.iterdir()} == {"new"}
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("reason", ["a file of others", "an old system", "a link"])
def test_files_are_replaced_where_the_folder_must_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Without its entry from before the first change to after the last."""
    out = real = tmp_path / "out"
    fill(out, "old", "index", "one", "three")
    fill(out / "deep", "old", "kept", "changed")
    if reason == "a file of others":
        fill(out, "mine", "notes")
    elif reason == "an old system":
        monkeypatch.setattr(atomic_files, "exchange", lambda one, other: False)
    else:
        real = out.rename(tmp_path / "real")
        out.symlink_to(real)
    seen: list[tuple[str, bool]] = []
    replace = os.replace

    def noted(source: Any, target: Any) -> None:
        seen.append((Path(target).name, (out / "index").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    with replacing_folder(
        out, is_part=lambda name: is_part(name) or name == "deep", is_entry=lambda n: n == "index"
    ) as draft:
        fill(draft, "new", "index", "one", "two")
        fill(draft / "deep", "new", "changed")
        assert (out / "index").read_text() == "old"
    assert seen[-1] == ("index", False) and len(seen) == 4
    assert not any(there for _, there in seen)
    notes = ["notes"] if reason == "a file of others" else []
    assert names(out) == ["deep", "index", *notes, "one", "two"]
    assert {(out / name).read_text() for name in ("index", "one", "two")} == {"new"}
    assert (out / "deep" / "changed").read_text() == "new"
    assert (out / "deep" / "kept").read_text() == "old"
    assert not list(tmp_path.rglob("*.part")) and real.is_dir()


def test_others_of_entrys_name_stay(tmp_path: Path) -> None:
    """An entry that neither the old set nor the new one has belongs to the user."""
    fill(tmp_path / "out", "mine", "adapter")
    fill(tmp_path / "out", "old", "index")
    with replacing_folder(
        tmp_path / "out", is_part=is_part, is_entry=lambda name: name in ("adapter", "index")
    ) as draft:
        fill(draft, "new", "index")
    assert (tmp_path / "out" / "adapter").read_text() == "mine"


def _is_entry(name: str) -> bool:
    return name == "model.safetensors"


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_what_fails_between_files_leaves_a_complete_set(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old entry is gone by then, and some files are new."""
    out, files = tmp_path / "out", ("config.json", "model.safetensors", "shards/1")
    fill(out, "old", *files, "notes")
    kinds: dict[str, type[BaseException]] = {"error": IoError, "interrupt": KeyboardInterrupt}
    real = os.replace

    def replace(one: Any, other: Any) -> None:
        if Path(other).name == "model.safetensors":
            raise OSError(errno.EIO, "") if how == "error" else KeyboardInterrupt
        real(one, other)

    with pytest.raises(kinds[how]) as caught, replacing_folder(out, is_entry=_is_entry) as draft:
        fill(draft, "new", *files)
        monkeypatch.setattr(os, "replace", replace)
    monkeypatch.undo()
    (kept,) = tmp_path.glob("out.*.complete/out")
    assert str(kept) in (str(caught.value) if how == "error" else caplog.text)
    assert all((kept / name).read_text() == "new" for name in files)
    assert not (out / "model.safetensors").exists()
    with replacing_folder(out, is_entry=_is_entry) as draft:
        fill(draft, "newer", *files)
    assert all((out / name).read_text() == "newer" for name in files)
    assert kept.is_dir(), "it is its owner's to remove"


def test_a_kill_between_files_leaves_a_complete_set(tmp_path: Path) -> None:
    out, files = tmp_path / "out", ("config.json", "model.safetensors", "shards/1")
    fill(out, "old", *files, "notes")

    def killed() -> None:
        real = os.replace

        def replace(one: Any, other: Any) -> None:
            if Path(other).name == "model.safetensors":
                os.kill(os.getpid(), signal.SIGKILL)
            real(one, other)

        os.replace = replace
        with replacing_folder(out, is_entry=_is_entry) as draft:
            fill(draft, "new", *files)

    writer = multiprocessing.get_context("fork").Process(target=killed)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    (kept,) = tmp_path.glob("out.*.complete/out")
    assert all((kept / name).read_text() == "new" for name in files)


def test_without_hard_links_files_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "")

    monkeypatch.setattr(os, "link", refuse)
    out, files = tmp_path / "out", ("config.json", "model.safetensors", "shards/1")
    fill(out, "old", *files, "notes")
    with replacing_folder(out, is_entry=_is_entry) as draft:
        fill(draft, "new", *files)
    assert all((out / name).read_text() == "new" for name in files)
    assert names(tmp_path) == ["out"]


def test_the_current_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in it, and paths relative to it, see the new files."""
    (tmp_path / "out" / "inner").mkdir(parents=True)
    for place in ("out", "out/inner"):
        monkeypatch.chdir(tmp_path / place)
        with replacing_folder(tmp_path / "out", is_part=lambda _: True) as draft:
            fill(draft, place, "a", "inner/b")
        assert os.path.samefile(".", tmp_path / place)
        assert (tmp_path / "out" / "a").read_text() == place


def test_the_current_directory_stays_below_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "real" / "out", "old", "a")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "link" / "out")
    with replacing_folder(tmp_path / "link" / "out", is_part=lambda _: True) as draft:
        fill(draft, "new", "a")
    assert Path("a").read_text() == "new"


def test_files_of_others_in_inner_folders_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "old", "a", "inner/b")
    fill(out, "mine", "inner/c")
    with replacing_folder(out) as draft:
        fill(draft, "new", "a", "inner/b")
    assert [(out / n).read_text() for n in ("a", "inner/b", "inner/c")] == ["new", "new", "mine"]


def test_a_file_that_others_create_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fill(out, "old", "a")
    exchange = atomic_files.exchange

    def later(one: Path, other: Path) -> bool:
        fill(out, "mine", "b")
        return exchange(one, other)

    monkeypatch.setattr(atomic_files, "exchange", later)
    with replacing_folder(out) as draft:
        fill(draft, "new", "a")
    assert [(out / n).read_text() for n in ("a", "b")] == ["new", "mine"]


def _write_sets(out: str, value: str, times: int) -> None:
    for _ in range(times):
        with replacing_folder(out, is_entry=_is_entry) as draft:
            fill(draft, value, *(f"part-{n}" for n in range(8)), "model.safetensors")


def test_files_of_others_that_cannot_be_moved_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, exchange, rename = tmp_path / "out", atomic_files.exchange, os.rename
    fill(out, "old", "a")

    def later(one: Path, other: Path) -> bool:
        fill(out, "mine", "b")
        return exchange(one, other)

    def refuse(one: Any, other: Any) -> None:
        if Path(other).name == "b":
            raise OSError(errno.EIO, "")
        rename(one, other)

    monkeypatch.setattr(atomic_files, "exchange", later)
    monkeypatch.setattr(os, "rename", refuse)
    with (
        pytest.raises(IoError, match=r"the new files are there, .* move them back"),
        replacing_folder(out) as draft,
    ):
        fill(draft, "new", "a")
    monkeypatch.undo()
    (kept,) = tmp_path.glob("out.*.complete/out")
    (kept / "b").rename(out / "b")  # as the message says
    assert [(out / name).read_text() for name in ("a", "b")] == ["new", "mine"]


@pytest.mark.parametrize("place", ["with files of others", "alone"])
def test_two_writers_of_one_folder(place: str, tmp_path: Path) -> None:
    """A folder that has an entry never mixes two sets."""
    out = tmp_path / "out"
    fill(out, "old", "model.safetensors", *(["notes"] if place != "alone" else []))
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        writers = [context.Process(target=_write_sets, args=(str(out), value, 5)) for value in "ab"]
        for each in writers:
            each.start()
        for each in writers:
            each.join()
            assert each.exitcode == 0
        found = {(out / name).read_text() for name in names(out) if name != "notes"}
        assert found in ({"a"}, {"b"})
