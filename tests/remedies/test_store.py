"""Remedies of what is said about stores, commits and the disks that they are on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.io_engine.manifest import MANIFEST_NAME
from overspill.io_engine.ownership import LOCK_NAME
from overspill.io_engine.store_file import STORE_NAME
from tests.devices import CPU, normal
from tests.remedies.table import (
    WIDTH,
    adamw,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)

SMALL = {"host_memory": "80KiB"}  # most is on disk
UPDATES = ["step", "next_forward", "backward"]


def run(folder: Path, steps: int, first: int = 0, **options: Any) -> tuple[Any, Any]:
    """A run in a store, after so many steps."""
    model = net(depth=6)
    optimizer = wrapped(model, nvme=folder, **{**SMALL, **options})
    for number in range(first, first + steps):
        step(model, optimizer, number)
    return model, optimizer


def reference(steps: int) -> Any:
    return plain_run(steps, net(depth=6))


def resumed(folder: Any, steps: int, **options: Any) -> None:
    """Require that a run that is resumed ends as if nothing had happened to it."""
    model = net(depth=6, seed=1)
    optimizer, _ = overspill.resume(
        model, folder, adamw(model), device=CPU, rates=overspill.Rates(), **{**SMALL, **options}
    )
    with optimizer:
        assert optimizer.step_count <= steps
        for number in range(optimizer.step_count, steps):
            step(model, optimizer, number)
        same(model, reference(steps))


def fails(model: Any, optimizer: Any, first: int) -> tuple[Exception, int]:
    """Train until an error comes; also how many steps were taken."""
    try:
        for number in range(first, first + 4):
            step(model, optimizer, number)
        optimizer.commit()
    except overspill.OffloadError as error:
        return error, optimizer.step_count
    raise AssertionError("nothing was wrong")


# -- a store that is lost while it is in use ------------------------------------------------------


def delete(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".away"))


def replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


READ = "weights and state can still be read: save model.state_dict() and optimizer.state_dict()"


@tries("offload/movement/health.py", "nothing more is trained or committed, but weights and state")
@tries("io_engine/store_file.py", "put it back, or open a new store in another directory")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("lose", [delete, rename, replace])
@pytest.mark.parametrize("name", [STORE_NAME, MANIFEST_NAME])
@pytest.mark.parametrize("way", ["state", "unwrap"])
def test_a_store_that_is_lost_is_saved_elsewhere(
    way: str, name: str, lose: Callable[[Path], None], update: str, tmp_path: Path
) -> None:
    """All that was trained is there, and training goes on in another store."""
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    model, optimizer = run(place, 2, update=update)
    optimizer.commit()
    lose(place / name)
    error, steps = fails(model, optimizer, 2)
    assert isinstance(error, overspill.IoError) and READ in str(error), error
    assert str(place) in str(error)
    with says(READ):
        step(model, optimizer)
    with says(READ):
        optimizer.save(tmp_path / "out")
    state = optimizer.state_dict()
    if way == "unwrap":
        overspill.unwrap(model)
    else:
        weights = model.state_dict()
        assert dict(overspill.named_weights(model)).keys() == weights.keys()
        optimizer.close()
        model = net(depth=6, seed=1)
        model.load_state_dict(weights)
    same(model, reference(steps))
    with wrapped(model, nvme=other, update=update, **SMALL) as optimizer:
        optimizer.load_state_dict(state)
        for number in range(steps, steps + 2):
            step(model, optimizer, number)
        same(model, reference(steps + 2))


def test_a_store_that_is_put_back_is_resumed(tmp_path: Path) -> None:
    model, optimizer = run(tmp_path, 2)
    optimizer.commit()
    path = tmp_path / STORE_NAME
    rename(path)
    fails(model, optimizer, 2)
    optimizer.close()
    path.with_suffix(".away").rename(path)
    resumed(tmp_path, 5)


@tries("io_engine/ownership.py", "end both, and resume one of them")
def test_a_lock_that_is_lost(tmp_path: Path) -> None:
    model, optimizer = run(tmp_path, 2)
    optimizer.commit()
    (tmp_path / LOCK_NAME).unlink()
    error, steps = fails(model, optimizer, 2)
    assert "end both, and resume one of them" in str(error) and READ in str(error)
    same(overspill.unwrap(model), reference(steps))
    resumed(tmp_path, 5)


@tries("io_engine/errors.py", "the device failed; see the kernel log and its health",
       "raise the disk quota, or choose another directory",
       "the file system has become read-only; see the kernel log",
       "see the kernel log, or choose another directory",
       "delete something there, or choose another place")  # fmt: skip
@pytest.mark.parametrize("code", [
    errno.EIO, errno.EDQUOT, errno.EROFS, errno.EBADMSG, errno.ENOSPC,
])  # fmt: skip
def test_a_disk_that_refuses_a_flush(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another directory is chosen for what is in memory and in the store."""
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    model, optimizer = run(place, 2)
    optimizer.commit()
    with monkeypatch.context() as patch:
        real = os.fdatasync

        def broken(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(place)):
                raise OSError(code, os.strerror(code))
            real(fd)

        patch.setattr(os, "fdatasync", broken)
        error, steps = fails(model, optimizer, 2)
        assert isinstance(error, overspill.IoError) and error.errno == code
        state = optimizer.state_dict()
        overspill.unwrap(model)
        with wrapped(model, nvme=other, **SMALL) as optimizer:
            optimizer.load_state_dict(state)
            for number in range(steps, steps + 2):
                step(model, optimizer, number)
            same(model, reference(steps + 2))
    resumed(place, 5)  # mended, the store has the last commit


@tries("offload/movement/health.py", "and continue from the last commit with overspill.resume",
       "build the model again, and load what was saved last")  # fmt: skip
@pytest.mark.parametrize("durable", [True, False])
def test_an_engine_that_stopped(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.movement.updates import Updater

    model, optimizer = run(tmp_path, 2, durable=durable)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    if durable:
        optimizer.commit()
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> None:
            raise ArithmeticError("broken")

        patch.setattr(Updater, "_update", broken)
        with says("broken"):
            step(model, optimizer, 2)
            optimizer.state_dict()
    words = f"with overspill.resume(model, {str(tmp_path)!r})" if durable else "saved last"
    with says(words):
        model.state_dict()
    optimizer.close()
    if durable:
        resumed(tmp_path, 5)
        return
    model = net(depth=6, seed=1)
    model.load_state_dict(saved)
    with wrapped(model) as optimizer:
        optimizer.load_state_dict(state)
        step(model, optimizer, 2)
        same(model, reference(3))


# -- a store that is in the way, or not there -----------------------------------------------------


@tries("io_engine/store_file.py",
       "continue it with overspill.resume(model, {}), delete {} in {}, or",
       "does not exist; create it, or choose another directory",
       "is not a directory; choose one")  # fmt: skip
@pytest.mark.parametrize("way", ["resume", "delete", "elsewhere", "not durable"])
def test_a_store_that_is_in_the_way(way: str, tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    run(place, 2)[1].close()
    with says(f"continue it with overspill.resume(model, {str(place)!r}), delete"):
        run(place, 0)
    if way == "resume":
        resumed(str(place), 4)
    elif way == "delete":
        (place / STORE_NAME).unlink()
        (place / MANIFEST_NAME).unlink()
        run(place, 2)[1].close()
        resumed(place, 4)
    elif way == "not durable":
        for _ in range(2):  # as often as one likes
            run(other, 2, durable=False)[1].close()
    else:
        run(other, 2)[1].close()
        resumed(other, 4)


@tries(
    "io_engine/committed.py", "give the directory that a run with nvme= and durable=True",
    "wrap the model to start a new run", "put it back from a copy, or start from an export",
)  # fmt: skip
@tries("io_engine/manifest.py", "restore this one file from a copy, or start from an export")
def test_what_is_no_whole_store(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with says("give the directory that a run with nvme= and durable=True has used"):
        resumed(tmp_path, 1)
    model, optimizer = run(place, 3)
    optimizer.save(tmp_path / "out")
    optimizer.close()
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    (place / STORE_NAME).unlink()
    with says("put it back from a copy, or start from an export"):
        resumed(place, 4)
    shutil.copy(copy / STORE_NAME, place / STORE_NAME)
    with (place / MANIFEST_NAME).open("r+b") as file:
        file.write(bytes(8192))
    with says("restore this one file from a copy, or start from an export"):
        resumed(place, 4)
    shutil.copy(copy / MANIFEST_NAME, place / MANIFEST_NAME)
    resumed(place, 5)
    from safetensors.torch import load_file

    model = net(depth=6, seed=1)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    with wrapped(model) as optimizer:  # from the export
        optimizer.load_state_dict(tmp_path / "out")
        step(model, optimizer, 3)
        same(model, reference(4))


@tries("io_engine/committed.py", "give the directories of one",
       "one is a copy; give the directories of one store",
       "mount it there, or give all directories where they are now",
       "give the directories of the copies, all of them, or move what is no longer")  # fmt: skip
def test_stripes(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for each in (first, second, other):
        each.mkdir()
    run([first, second], 3)[1].close()  # type: ignore[arg-type]
    run(other, 1)[1].close()
    with says("give the directories of one"):
        resumed([first, other], 4)
    copied = tmp_path / "copied"
    shutil.copytree(first, copied)
    with says("one is a copy; give the directories of one store"):
        resumed([first, copied], 4)
    with says("give the directories of the copies, all of them, or move what is no longer wanted"):
        resumed([copied], 4)
    moved = tmp_path / "moved"
    second.rename(moved)
    with says("mount it there, or give all directories where they are now"):
        resumed([first], 4)
    resumed([first, moved], 4)
    moved.rename(second)
    resumed([first, second], 5)
    both = [tmp_path / "copies" / name for name in ("first", "second")]
    for one, its in zip((first, second), both, strict=True):
        shutil.copytree(one, its)
    resumed(both, 6)
    shutil.rmtree(first)
    shutil.rmtree(second)
    resumed(both, 7)


@tries("io_engine/ownership.py", "replace one of them with a copy of its own",
       "cannot be a lock; remove it, or choose")  # fmt: skip
@tries("io_engine/errors.py", "a folder has the name of the file; remove it, or choose another",
       "none is followed here; remove the link")  # fmt: skip
@tries("io_engine/manifest.py", "is not a regular file; remove it")
def test_files_that_are_not_plain(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    run(place, 2)[1].close()
    os.link(place / STORE_NAME, tmp_path / "linked")
    with says("replace one of them with a copy of its own (cp --remove-destination)"):
        resumed(place, 3)
    shutil.copy(tmp_path / "linked", tmp_path / "own")
    (tmp_path / "own").replace(place / STORE_NAME)
    resumed(place, 3)
    lock = tmp_path / "lock"
    lock.mkdir()
    (lock / LOCK_NAME).mkdir()
    with says("a folder has the name of the file; remove it, or choose another directory"):
        run(lock, 0)
    (lock / LOCK_NAME).rmdir()
    (lock / LOCK_NAME).symlink_to(place / LOCK_NAME)
    with says("it is a symbolic link, and none is followed here; remove the link"):
        run(lock, 0)
    (lock / LOCK_NAME).unlink()
    os.mkfifo(lock / LOCK_NAME)
    with says("cannot be a lock; remove it, or choose another directory"):
        run(lock, 0)
    (lock / LOCK_NAME).unlink()
    run(lock, 1)[1].close()
    (lock / MANIFEST_NAME).unlink()
    os.mkfifo(lock / MANIFEST_NAME)
    (lock / STORE_NAME).unlink()
    with says("is not a regular file; remove it"):
        run(lock, 0)
    (lock / MANIFEST_NAME).unlink()
    run(lock, 1)[1].close()


# -- commits and resume ----------------------------------------------------------------------------


@tries("offload/loop.py", "needs a durable store; pass nvme= (a directory) to wrap, and leave")
@tries("offload/durable/export.py", "is there already; choose another place, or remove it")
def test_save(tmp_path: Path) -> None:
    model = net()
    with wrapped(model) as optimizer, says("needs a durable store; pass nvme= (a directory)"):
        optimizer.save(tmp_path / "out")
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    out.mkdir()
    (out / "x").touch()
    _, optimizer = run(place, 1)
    with optimizer:
        with says("is there already; choose another place, or remove it"):
            optimizer.save(out)
        optimizer.save(tmp_path / "other")
        shutil.rmtree(out)
        optimizer.save(out)
    names = sorted(each.name for each in out.iterdir())
    assert names == sorted(each.name for each in (tmp_path / "other").iterdir())


@tries("offload/durable/resume.py", "{}= is for wrap: resume takes the weights of the store",
       "leave durable out", "leave nvme out to go on in the store, or give directories without it",
       "pass such an optimizer to resume")  # fmt: skip
@tries("offload/api.py", "build it as for the run before")
def test_resume(tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    run(place, 2)[1].close()
    with says("is for wrap: resume takes the weights of the store"):
        resumed(place, 3, weights=tmp_path)
    with says("leave durable out"):
        resumed(place, 3, durable=False)
    with says("leave nvme out to go on in the store, or give directories without it"):
        resumed(place, 3, nvme=[place, other])
    model = net(depth=6, seed=1)
    with says("pass such an optimizer to resume"):
        overspill.resume(model, place, torch.optim.SGD(model.parameters(), 0.1), device=CPU)
    two = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    with says("build it as for the run before"):
        overspill.resume(model, place, two, device=CPU)
    resumed(place, 3)
    resumed(place, 4, nvme=other)


@tries("offload/schedule/describe.py", "; use the optimizer, moments= and master= of the store")
def test_resume_with_other_state(tmp_path: Path) -> None:
    run(tmp_path, 2)[1].close()
    other = net(depth=6)
    with says("use the optimizer, moments= and master= of the store"):
        overspill.resume(other, tmp_path, adamw(other, amsgrad=True), device=CPU, **SMALL)
    resumed(tmp_path, 4)


@tries("offload/durable/resume.py", "build that optimizer and pass it to resume")
def test_resume_of_a_rule_that_torch_lacks(tmp_path: Path) -> None:
    model = net()
    with wrapped(model, overspill.optim.Lion(model.parameters()), nvme=tmp_path) as optimizer:
        step(model, optimizer)
    model = net(seed=1)
    with says("build that optimizer and pass it to resume"):
        overspill.resume(model, tmp_path, device=CPU)
    lion = overspill.optim.Lion(model.parameters())
    optimizer, _ = overspill.resume(model, tmp_path, lion, device=CPU)
    with optimizer:
        trains(model, optimizer, 1)


@tries("offload/durable/commits.py", "rollback(), or load weights and state",
       "load weights and state again")  # fmt: skip
@pytest.mark.parametrize("way", ["rollback", "load"])
def test_values_that_are_not_finite(way: str, tmp_path: Path) -> None:
    model, optimizer = run(tmp_path, 2)
    with optimizer:
        optimizer.commit()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = optimizer.state_dict()
        with torch.no_grad():
            model[0][0].weight.fill_(float("nan"))
        with says("rollback(), or load weights and state"):
            optimizer.commit()
        if way == "rollback":
            optimizer.rollback()
        else:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        optimizer.commit()
        step(model, optimizer, 2)
        same(model, reference(3))


@tries("offload/durable/meta.py", "use numbers, texts, tensors, and lists, tuples and dicts")
def test_extra_that_cannot_be_read_back(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    _, optimizer = run(one, 0, extra=lambda: {"x": object()})
    with says("use numbers, texts, tensors, and lists, tuples and dicts of them"):
        optimizer.commit()
    optimizer.close()
    _, optimizer = run(two, 1, extra=lambda: {"x": [1, "a", normal(0, WIDTH)]})
    optimizer.commit()
    optimizer.close()
    resumed(two, 2)


def test_after_close_of_a_durable_store(tmp_path: Path) -> None:
    """The message names the call that brings the trained weights back."""
    model = net()
    optimizer = wrapped(model, nvme=tmp_path)
    step(model, optimizer)
    optimizer.close()
    with says(f"; build the model again and call overspill.resume(model, {str(tmp_path)!r})"):
        model(normal(0, 2, WIDTH))
    model = net()
    resumed, _ = overspill.resume(model, tmp_path, adamw(model), device=CPU)
    overspill.unwrap(model)
    resumed.close()
    same(model, plain_run(1))
