"""Who may take a store over: no stranger, no part of one, nobody through a planted link."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.durable.export import export_store
from overspill.durable.inspect import inspect_store, repair_store
from overspill.errors import OffloadError
from overspill.io_engine import ownership
from overspill.io_engine.manifest import MANIFEST_NAME
from overspill.io_engine.ownership import LOCK_NAME
from overspill.io_engine.store_file import STORE_NAME
from tests.patience import WAIT_S
from tests.resumed import adamw, assert_same, build, options, train, weights

NAMES = (STORE_NAME, MANIFEST_NAME)
MOVED = "was being read; try again when the run has ended"


def folders(base: Path, *names: str) -> list[Path]:
    made = [base / name for name in names]
    for each in made:
        each.mkdir()
    return made


def trained(places: list[Path], steps: int = 2, **more: Any) -> dict[str, Any]:
    """A store with a commit; returns the weights in it."""
    model = build()
    with overspill.wrap(model, adamw(model), **options(places, **more)) as optimizer:
        train(model, optimizer, steps)
        return weights(model)


def contents(places: list[Path]) -> dict[Path, bytes]:
    return {
        place / name: (place / name).read_bytes()
        for place in places
        for name in NAMES
        if (place / name).exists()
    }


def wrap_on(places: list[Path]) -> Any:
    model = build()
    return overspill.wrap(model, adamw(model), **options(places))


def test_no_stripe_of_a_committed_store_is_taken_over(tmp_path: Path) -> None:
    """Whatever part of its directories is given, in whatever order, with others or alone."""
    a, b, c = folders(tmp_path, "a", "b", "c")
    wanted = trained([a, b])
    before = contents([a, b])
    for places in ([b, a], [b], [a], [c, b], [b, c], [a, c], [c, a], [a, b]):
        with pytest.raises(overspill.IoError, match="committed") as caught:
            wrap_on(places)
        assert str(a) in str(caught.value)
        assert contents([a, b]) == before
        assert not any(c.iterdir())
    for places in ([b], [b, a], [a], [a, b]):
        model = build()
        optimizer, _ = overspill.resume(model, places, adamw(model), **resumable())
        with optimizer:
            assert optimizer.step_count == 2
            assert_same(weights(model), wanted)


def resumable() -> dict[str, Any]:
    given = options("")
    del given["nvme"]
    return given


def test_a_stripe_whose_others_are_gone_is_not_taken_over(tmp_path: Path) -> None:
    """It knows by itself; ``resume`` says what is missing, and finds it where it is now."""
    a, b = folders(tmp_path, "a", "b")
    wanted = trained([a, b])
    moved = a.rename(tmp_path / "moved")
    with pytest.raises(overspill.IoError, match=r"stripe 2 of 2 of the store that was committed"):
        wrap_on([b])
    model = build()
    with pytest.raises(overspill.IoError, match=r"number 1, which was .*/a, is missing"):
        overspill.resume(model, b, adamw(model), **resumable())
    optimizer, _ = overspill.resume(model, [b, moved], adamw(model), **resumable())
    with optimizer:
        assert_same(weights(model), wanted)


@pytest.mark.parametrize("number", [0, 1])
def test_a_copy_of_one_stripe_does_not_take_the_others(tmp_path: Path, number: int) -> None:
    """The store it was copied from goes on as if the copy were not there; a whole copy is a store
    of its own, and a stripe that was moved still belongs."""
    places = folders(tmp_path, "a", "b")
    wanted = trained(places)
    copies = [shutil.copytree(each, tmp_path / f"{each.name}-copy") for each in places]
    before = contents([*places, *copies])
    mixed = [*places]
    mixed[number] = copies[number]
    for given in (copies[number], mixed, mixed[::-1]):
        for use in (resumed, inspect_store, lambda given: export_store(given, tmp_path)):
            with pytest.raises(overspill.IoError, match="is a copy of"):
                use(given)
    assert contents([*places, *copies]) == before
    assert_same(resumed(copies), wanted)
    link = tmp_path / "link"
    link.symlink_to(places[number])
    assert_same(resumed(link), wanted)
    moved = mixed[number] = places[number].rename(tmp_path / "moved")
    assert_same(resumed(moved), wanted)
    assert_same(resumed(mixed), wanted)


def resumed(given: Any) -> dict[str, Any]:
    """The weights that a store gives."""
    model = build()
    optimizer, _ = overspill.resume(model, given, adamw(model), **resumable())
    with optimizer:
        return weights(model)


def test_what_was_never_trained_is_taken_over(tmp_path: Path) -> None:
    """The state before the first step, which every run commits, keeps no directory."""
    a, b = folders(tmp_path, "a", "b")
    wrap_on([a, b]).close()
    assert not any(a.iterdir()) and not any(b.iterdir())
    script = CHILD.replace("STEPS", "0").replace("AFTER", DIES)
    assert run(script, a, b).returncode == 9
    assert contents([a, b]) != {}
    trained([b, a])


def test_a_commit_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    """Also one before the first step."""
    optimizer = wrap_on([tmp_path])
    optimizer.commit()
    optimizer.close()
    with pytest.raises(overspill.IoError, match="committed at step 0"):
        wrap_on([tmp_path])


def test_nothing_goes_where_another_directory_is_refused(tmp_path: Path) -> None:
    """A leftover is removed only when all directories are found free."""
    a, b = folders(tmp_path, "a", "b")
    trained([b])
    script = CHILD.replace("STEPS", "0").replace("AFTER", DIES)
    assert run(script, a, "").returncode == 9
    time.sleep(0.2)
    before = contents([a])
    while before != (now := contents([a])):  # the kernel ends the writes of who has died later
        before = now
        time.sleep(0.1)
    assert before
    with pytest.raises(overspill.IoError, match="committed at step 2"):
        wrap_on([a, b])
    assert contents([a]) == before


def test_commits_made_before_the_lock_was_had_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process trains on while this one has read the manifest and has no lock yet."""
    trained([tmp_path], 2)
    real = ownership.DirectoryLock.__init__

    def late(self: Any, directory: Path) -> None:
        monkeypatch.undo()
        done = run(CHILD.replace("STEPS", "5").replace("AFTER", "optimizer.close()"), directory, "")
        assert done.returncode == 0, done.stderr
        real(self, directory)

    monkeypatch.setattr(ownership.DirectoryLock, "__init__", late)
    model = build()
    optimizer, _ = overspill.resume(model, tmp_path, adamw(model), **resumable())
    with optimizer:
        assert optimizer.step_count == 5
        train(model, optimizer, 6)
    assert [each.step for each in inspect_store(tmp_path).commits][-2:] == [5, 6]


CHILD = """
import os, sys
import overspill
from tests.resumed import adamw, build, options, train
model = build()
given = options([place for place in sys.argv[1:] if place])
try:
    optimizer = overspill.wrap(model, adamw(model), **given)
except overspill.IoError:
    places = given.pop("nvme")
    optimizer, _ = overspill.resume(model, places, adamw(model), **given)
train(model, optimizer, STEPS)
AFTER
"""


DIES = """
import torch
model(torch.randn(2, 96)).sum().backward()  # a forward that trains: now there is a commit
optimizer._engine.runtime.executor.protocol.wait(overspill.schedule.messages.Until.DURABLE)
os._exit(9)
"""


def run(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
        cwd=Path(__file__).parents[2], timeout=WAIT_S, check=False, env=os.environ,
    )  # fmt: skip


def test_a_loader_worker_that_lives_on_locks_nothing(tmp_path: Path) -> None:
    """The owner is killed; a child that it had forked is still there."""
    wait = """
pid = os.fork()
if pid == 0:
    import time; os.close(1); os.close(2)
    time.sleep(100)
    os._exit(0)
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = run(CHILD.replace("STEPS", "2").replace("AFTER", wait), tmp_path, "")
    assert done.returncode == -signal.SIGKILL, done.stderr
    orphan = int(done.stdout.split()[-1])
    try:
        model = build()
        optimizer, _ = overspill.resume(model, tmp_path, adamw(model), **resumable())
        optimizer.close()
        os.kill(orphan, 0)  # it has been there all the time
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_store_in_use_is_not_repaired(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 1)
        with pytest.raises(overspill.IoError, match="in use by this process"):
            repair_store(tmp_path)


# -- planted links and strangers' files ----------------------------------------------------------


@contextmanager
def precious(path: Path) -> Iterator[Path]:
    """A file that must stay as it is."""
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", [LOCK_NAME, STORE_NAME, MANIFEST_NAME, f"{MANIFEST_NAME}.new"])
def test_no_planted_link_is_followed(tmp_path: Path, name: str) -> None:
    """What it points at is neither emptied, nor written, nor removed."""
    (place,) = folders(tmp_path, "place")
    with precious(tmp_path / "precious") as victim:
        (place / name).symlink_to(victim)
        try:
            wrap_on([place]).close()
        except overspill.IoError as error:
            assert "symbolic link" in str(error)
            assert (place / name).is_symlink()


@pytest.mark.parametrize("name", [STORE_NAME, MANIFEST_NAME])
def test_a_store_behind_links_is_refused(tmp_path: Path, name: str) -> None:
    (place,) = folders(tmp_path, "place")
    trained([place])
    (place / name).rename(tmp_path / name)
    (place / name).symlink_to(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    model = build()
    with pytest.raises(overspill.IoError, match=r"symbolic link|store file has"):
        overspill.resume(model, place, adamw(model), **resumable())
    assert (tmp_path / name).read_bytes() == before


def test_an_export_leaves_strangers_alone(tmp_path: Path) -> None:
    (place,) = folders(tmp_path, "store")
    trained([place])
    (stranger,) = folders(tmp_path, ".out.part")
    hexes = "0123456789abcdef" * 2
    (notes,) = folders(tmp_path, f".out.{hexes}.part")
    link = tmp_path / f".out.{hexes[::-1]}.part"
    with precious(stranger / "thesis.txt"), precious(notes / "thesis.txt") as kept:
        link.symlink_to(notes)
        export_store(place, tmp_path / "out")
        assert link.is_symlink() and kept.exists()
    assert (tmp_path / "out" / "model.safetensors").exists()
    with precious(tmp_path / "elsewhere") as victim:
        (tmp_path / "link").symlink_to(victim)
        with pytest.raises(OffloadError, match="is there already"):
            export_store(place, tmp_path / "link")
    (empty,) = folders(tmp_path, "empty")
    (tmp_path / "to_empty").symlink_to(empty)
    with pytest.raises(OffloadError, match="is there already"):
        export_store(place, tmp_path / "to_empty")


def test_what_killed_exports_left_goes(tmp_path: Path) -> None:
    """And what others are writing at this moment stays."""
    (place,) = folders(tmp_path, "store")
    trained([place])
    dead, alive = folders(tmp_path, f".out.{'0' * 32}.part", f".out.{'1' * 32}.part")
    for each in (dead, alive):
        (each / "out").mkdir()
        (each / "out" / "model-00001-of-00002.safetensors").write_bytes(b"some")
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    export_store(place, tmp_path / "out")
    os.close(fd)
    assert alive.exists() and not dead.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [alive.name, "out", "store"]


def test_a_store_that_trains_on_is_not_called_damaged(tmp_path: Path) -> None:
    """Inspecting and exporting beside training: well, or a word of what happened."""
    folders(tmp_path, "store")
    wait = """
optimizer.commit()
print("begun", flush=True)
while True:
    train(model, optimizer, optimizer.step_count + 1)
"""
    script = CHILD.replace("STEPS", "1").replace("AFTER", wait)
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "store"), ""], stdout=subprocess.PIPE,
        text=True, cwd=Path(__file__).parents[2], env=os.environ,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "begun\n"
        said: dict[str, int] = {}
        until = time.monotonic() + 3
        number = 0
        while time.monotonic() < until:
            number += 1
            work: list[Callable[[], Any]] = [
                lambda: inspect_store(tmp_path / "store").wrong,
                lambda n=number: export_store(tmp_path / "store", tmp_path / f"out{n}"),
            ]
            for each in work:
                try:
                    outcome = "well" if each() else "well, empty"
                except OffloadError as error:
                    assert not isinstance(error, overspill.CorruptionError), error
                    outcome = MOVED if MOVED in str(error) else str(error)
                said[outcome] = said.get(outcome, 0) + 1
        assert set(said) <= {"well", "well, empty", MOVED}, said
    finally:
        child.kill()
        child.wait()


def test_whoever_lost_his_lock_is_told_before_he_commits(tmp_path: Path) -> None:
    """A cleaner of old files has deleted it, so another process may own the store by now."""
    model = build()
    optimizer = overspill.wrap(model, adamw(model), **options(tmp_path))
    train(model, optimizer, 1)
    optimizer.commit()
    (tmp_path / LOCK_NAME).unlink()
    with pytest.raises(overspill.IoError, match="the lock has been deleted"):
        train(model, optimizer, 2)
        optimizer.commit()
    optimizer.close()
    again = build()
    optimizer, _ = overspill.resume(again, tmp_path, adamw(again), **resumable())
    with optimizer:
        assert optimizer.step_count == 1


def test_a_lock_is_a_plain_file_of_its_own(tmp_path: Path) -> None:
    (place,) = folders(tmp_path, "place")
    with precious(tmp_path / "precious") as victim:
        os.link(victim, place / LOCK_NAME)
        with pytest.raises(overspill.IoError, match="is not a regular file, or has several names"):
            wrap_on([place])
    (place / LOCK_NAME).unlink()
    os.mkfifo(place / LOCK_NAME)
    with pytest.raises(overspill.IoError, match="is not a regular file, or has several names"):
        wrap_on([place])
    (place / LOCK_NAME).unlink()
    os.mkfifo(place / MANIFEST_NAME)
    for use in (lambda: wrap_on([place]), lambda: inspect_store(place)):
        with pytest.raises(overspill.IoError, match="is not a regular file"):
            use()


def test_a_mark_without_a_commit_keeps_nothing(tmp_path: Path) -> None:
    """It was killed between the two: nobody can resume that, so whoever wraps may begin anew."""
    a, b = folders(tmp_path, "a", "b")
    dies = """
from overspill.io_engine.manifest import Manifest
real = Manifest._append
Manifest._append = lambda self, kind, payload: os._exit(9)
optimizer.commit()
"""
    done = run(CHILD.replace("STEPS", "0").replace("AFTER", dies), a, b)
    assert done.returncode == 9, done.stderr
    with pytest.raises(overspill.IoError, match="stripe 2 of 2"):
        wrap_on([b])  # the first stripe is not locked, and cannot be asked
    trained([a, b])


@pytest.mark.parametrize("name", NAMES)
def test_a_hard_linked_copy_is_not_written_to(tmp_path: Path, name: str) -> None:
    """Else the copy (``cp -al``) would be changed along with the store."""
    a, b = folders(tmp_path, "a", "b")
    wanted = trained([a])
    for each in NAMES:
        if each == name:
            os.link(a / each, b / each)
        else:
            shutil.copy2(a / each, b / each)
    for place in (a, b):
        with pytest.raises(overspill.IoError, match="hard link"):
            resumed(place)
    (b / name).unlink()
    assert_same(resumed(a), wanted)


def test_a_store_file_that_is_renamed_is_missed(tmp_path: Path) -> None:
    model = build()
    optimizer = overspill.wrap(model, adamw(model), **options(tmp_path))
    train(model, optimizer, 2)
    (tmp_path / STORE_NAME).rename(tmp_path / "elsewhere")
    with pytest.raises(overspill.IoError, match="deleted, renamed or replaced"):
        train(model, optimizer, 4)
        optimizer.commit()
    optimizer.close()
    (tmp_path / "elsewhere").rename(tmp_path / STORE_NAME)
    resumed(tmp_path)


def test_a_store_and_its_copy_are_not_one(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    trained([a])
    shutil.copytree(a, b, dirs_exist_ok=True)
    with pytest.raises(overspill.IoError, match="one is a copy"):
        resumed([a, b])


def test_a_mark_that_is_damaged_still_keeps_its_stripe(tmp_path: Path) -> None:
    a, b = folders(tmp_path, "a", "b")
    wanted = trained([a, b])
    data = bytearray((b / MANIFEST_NAME).read_bytes())
    data[-4000] ^= 1
    (b / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(overspill.IoError, match="stripe 2 of 2"):
        wrap_on([b])
    assert_same(resumed(a), wanted)
