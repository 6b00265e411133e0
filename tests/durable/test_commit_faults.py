"""A disk that fails in the middle of a commit, or loses what was not flushed when power goes.

The run stops with one clear error; the last commit is whole; once the disk is well again,
``overspill.resume`` ends with the very bits of a run that nothing happened to.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overspill
import overspill.movement.store
from overspill.io_engine import IoEngine
from overspill.io_engine.manifest import MANIFEST_NAME, RecordKind, read_manifest
from overspill.io_engine.native import NATIVE
from overspill.io_engine.store_file import STORE_NAME
from tests.devices import CPU, normal
from tests.faults import Faults, faulty_disk

WIDTH, STEPS = 64, 6
MODES: list[dict[str, Any]] = [
    {"update": "step", "host_memory": "400KiB"},  # some of everything is on disk
    {"update": "next_forward", "host_memory": "64MiB"},  # only commits write
]
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU())
                           for _ in range(4)])  # fmt: skip


def start(folder: Path, mode: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Goes on in the store, or begins it where nothing was ever committed."""
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"device": CPU, "rates": overspill.Rates(), **mode}
    try:
        return model, overspill.resume(model, folder, inner, **options)[0]
    except overspill.CorruptionError:
        raise
    except overspill.IoError as error:
        if not any(words in str(error) for words in ("no store here", "never committed")):
            raise
    torch.manual_seed(5)
    return model, overspill.wrap(model, inner, nvme=folder, **options)


def train(model: nn.Module, optimizer: Any) -> None:
    while optimizer.step_count < STEPS:
        model(normal(optimizer.step_count, 4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def finish(folder: Path, mode: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """The step that the run goes on from, and the weights that it ends with."""
    model, optimizer = start(folder, mode)
    with optimizer:
        first = optimizer.step_count
        train(model, optimizer)
        return first, {name: value.clone() for name, value in model.state_dict().items()}


@functools.cache
def wanted(number: int, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    return finish(folder, MODES[number])[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def fail(folder: Path, mode: dict[str, Any]) -> overspill.OffloadError:
    """Trains until it fails; what failed is said once, and closing after it is quiet."""
    model, optimizer = start(folder, mode)
    try:
        with pytest.raises(overspill.OffloadError) as caught:
            train(model, optimizer)
            optimizer.commit()
        with pytest.raises(overspill.OffloadError, match="stopped after an earlier error"):
            optimizer.step()
    finally:
        optimizer.close()
    return caught.value


def goes_on(folder: Path, number: int, base: Path, least: int, most: int) -> None:
    first, found = finish(folder, MODES[number])
    assert least <= first <= most
    for name, value in wanted(number, base / str(number)).items():
        assert torch.equal(found[name], value), name


class Broken:
    """Calls on one file go wrong from the ``after``-th on, until ``mend``."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, name: str, code: int, after: int):
        self.calls, self.name, self.code, self.after = 0, name, code, after
        self._real = getattr(os, call)
        self.partly: Callable[..., Any] | None = None  # what still happens when it goes wrong
        patch.setattr(os, call, self)

    def __call__(self, fd: int, *arguments: Any) -> Any:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) != self.name:
            return self._real(fd, *arguments)
        self.calls += 1
        if self.calls <= self.after:
            return self._real(fd, *arguments)
        if self.partly is not None and self.calls == self.after + 1:
            self.partly(fd, *arguments)
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("number", range(len(MODES)))
@pytest.mark.parametrize("code", ERRORS)
def test_the_flush_of_the_data_fails(
    tmp_path: Path, base: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Broken(patch, "fdatasync", STORE_NAME, code, 5)
        error = fail(tmp_path, MODES[number])
    assert isinstance(error, overspill.IoError) and error.errno == code
    assert "cannot flush" in str(error) and str(tmp_path) in str(error)
    goes_on(tmp_path, number, base, 3, 3)  # flushed: its creation, and steps 0 to 3


@pytest.mark.parametrize("number", range(len(MODES)))
@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("what", ["record", "seal"])
def test_the_record_cannot_be_appended(
    tmp_path: Path, base: Path, number: int, code: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is written; of a record that lacks only its seal, the commit holds."""
    with monkeypatch.context() as patch:
        real = os.pwrite
        broken = Broken(patch, "pwrite", MANIFEST_NAME, code, 6 if what == "record" else 7)
        broken.partly = lambda fd, data, at: real(fd, data[: len(data) // 2], at)
        error = fail(tmp_path, MODES[number])
    assert isinstance(error, overspill.IoError) and error.errno == code
    assert "cannot commit" in str(error) and str(tmp_path) in str(error)
    step = 2 if what == "record" else 3
    goes_on(tmp_path, number, base, step, step)


@pytest.mark.parametrize("number", range(len(MODES)))
@pytest.mark.parametrize("kept", [True, False])
def test_the_flush_of_the_record_fails(
    tmp_path: Path, base: Path, number: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may show the record all the same, from memory alone, or have dropped it."""
    with monkeypatch.context() as patch:
        Broken(patch, "fdatasync", MANIFEST_NAME, errno.EIO, 3)
        error = fail(tmp_path, MODES[number])
    assert "cannot commit" in str(error)
    if not kept:
        data = bytearray((tmp_path / MANIFEST_NAME).read_bytes())
        data[-4096:] = bytes(4096)
        (tmp_path / MANIFEST_NAME).write_bytes(data)
    step = 3 if kept else 2
    goes_on(tmp_path, number, base, step, step)


@pytest.mark.skipif(NATIVE is None, reason="simulated disks need the extension")
@pytest.mark.parametrize("number", range(len(MODES)))
@pytest.mark.parametrize(("kind", "rate"), [("io_error", 0.02), ("no_space", 0.06)])
def test_the_data_cannot_be_written(
    tmp_path: Path, base: Path, number: int, kind: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a seed has it."""
    failed = 0
    for seed in range(4):
        place = tmp_path / str(seed)
        place.mkdir()
        with monkeypatch.context() as patch:
            disk = faulty_disk(Faults(seed=seed, **{kind: rate}))
            patch.setattr(
                overspill.movement.store, "IoEngine", functools.partial(IoEngine, backend=disk)
            )
            with contextlib.suppress(overspill.IoError):  # wrap itself could not write
                assert "bytes at offset" in str(fail(place, MODES[number]))
                failed += 1
        goes_on(place, number, base, 0, STEPS)
    assert failed


def test_a_record_whose_flush_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What memory shows and the disk may lack must be there before its extents are relied on."""
    with monkeypatch.context() as patch:
        Broken(patch, "fdatasync", MANIFEST_NAME, errno.EIO, 3)
        fail(tmp_path, MODES[0])
    at = (tmp_path / MANIFEST_NAME).stat().st_size
    record = read_manifest(tmp_path).log.records[-1]  # type: ignore[union-attr]
    assert record.kind == RecordKind.COMMIT and record.end == at
    calls: list[tuple[str, str, int]] = []
    with monkeypatch.context() as patch:
        write, flush = os.pwrite, os.fdatasync

        def name(fd: int) -> str:
            return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

        def pwrite(fd: int, data: bytes, at: int) -> int:
            calls.append(("write", name(fd), at))
            return write(fd, data, at)

        def fdatasync(fd: int) -> None:
            calls.append(("flush", name(fd), 0))
            flush(fd)

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "fdatasync", fdatasync)
        start(tmp_path, MODES[0])[1].close()
    mine = [(what, at) for what, file, at in calls if file == MANIFEST_NAME]
    assert mine[:3] == [("write", record.offset), ("flush", 0), ("write", record.end)]


class PowerCut:
    """Keeps pictures of a store as a power cut at many instants would leave it.

    Of every sector that was written since the last flush of its file ended, a picture has the old
    content or the new one, by chance.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.pictures: list[dict[str, bytes]] = []
        self.seals = 0  # pictures in which a seal is lost
        self._real = os.fdatasync
        self._flushed: dict[str, bytes] = {}
        patch.setattr(os, "fdatasync", self)

    def __call__(self, fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        now = (self.folder / name).read_bytes()
        self.take()
        self._real(fd)
        self._flushed[name] = now
        self.take()

    def take(self) -> None:
        if not (self.folder / MANIFEST_NAME).exists():
            return  # the store is being made
        self._flushed.setdefault(MANIFEST_NAME, (self.folder / MANIFEST_NAME).read_bytes())
        self._draw(self.rng.choice([0.0, 0.5, 1.0]))
        self._lose_seal()

    def _lose_seal(self) -> None:
        """Of what was written since the last flush, the first sector alone is lost: the seal."""
        now = (self.folder / MANIFEST_NAME).read_bytes()
        at = len(self._flushed[MANIFEST_NAME])
        if len(now) > at + 4096:
            torn = now[:at] + bytes(4096) + now[at + 4096 :]
            self.pictures.append({MANIFEST_NAME: torn, STORE_NAME: self._read(STORE_NAME)})
            self.seals += 1

    def _read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def _draw(self, share: float) -> None:
        picture = {}
        for name in (STORE_NAME, MANIFEST_NAME):
            now = np.frombuffer((self.folder / name).read_bytes(), np.uint8)
            old = self._flushed.get(name, b"")
            before = np.zeros_like(now)
            before[: len(old)] = np.frombuffer(old, np.uint8)[: now.size]
            sectors, kept = now.reshape(-1, 4096).copy(), before.reshape(-1, 4096)
            lost = [n for n in range(len(sectors)) if self.rng.random() < share]
            sectors[lost] = kept[lost]
            picture[name] = sectors.tobytes()
        self.pictures.append(picture)


@pytest.mark.parametrize("number", range(len(MODES)))
def test_what_was_not_flushed_is_lost_or_torn(
    tmp_path: Path, base: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut before or after any flush: the store opens at a committed step."""
    with monkeypatch.context() as patch:
        cut = PowerCut(patch, tmp_path, number)
        finish(tmp_path, MODES[number])
    assert cut.seals > 2
    steps = set()
    for picture in cut.pictures:
        for name, data in picture.items():
            (tmp_path / name).write_bytes(data)
        first, found = finish(tmp_path, MODES[number])
        steps.add(first)
        for name, value in wanted(number, base / str(number)).items():
            assert torch.equal(found[name], value), name
    assert steps == set(range(STEPS + 1))
