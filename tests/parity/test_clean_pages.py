"""Weights that are not trained are clean: written once, kept once, changed only by an edit."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.io_engine import store_file
from tests.devices import CPU, normal
from tests.parity.test_partly_frozen import PLACES, WIDTH, build, trained

RATES = overspill.Rates()


def wrap(folder: Path, place: str, **options: Any) -> Any:
    model = build()
    folder.mkdir(exist_ok=True)
    adamw = torch.optim.AdamW(trained(model), lr=1e-2)
    options = {**PLACES[place], "nvme": folder, "rates": RATES, **options}
    return model, overspill.wrap(model, adamw, **options)


def step(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    model(normal(number, 4, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_frozen_is_never_written(
    place: str, update: str, durable: bool, tmp_path: Path
) -> None:
    model, optimizer = wrap(tmp_path, place, update=update, durable=durable)
    with optimizer:
        for number in range(4):
            step(model, optimizer, number)
        layout = optimizer.plan.detail.layout
    written = [s for s in optimizer._engine.trace.spans() if s.lane == "write"]
    trains = sum(u.weight_bytes for u in layout.units if u.trainable)
    trains += sum(s.nbytes for s in layout.records)
    base = [s for s in written if "(frozen)" in s.name]
    # What lives in memory goes into the first commit.
    assert len(base) == len({s.name for s in base}) <= int(durable) * len(layout.units)
    assert sum(s.nbytes for s in written if s not in base) <= 5 * trains
    assert optimizer.plan.link_bytes.get("write", 0) <= trains
    frozen = [u for u in layout.units if not u.trainable]
    assert len(frozen) == len(layout.units) // 2
    assert not [c for u in layout.units for c in u.chunks if u.trainable and c.group is None]


def test_trained_parts_stay_where_memory_allows(tmp_path: Path) -> None:
    """That of adapters that are an eighth of their base: half of what nothing else needs."""
    place = next(iter(PLACES))
    memory = {"device_memory": "160KiB"} if place == "device" else {}
    _, optimizer = wrap(tmp_path, place, durable=False, **memory)
    with optimizer:
        for unit, home in optimizer.plan.placement.items():
            if "(frozen)" not in unit:
                assert home.resident and "nvme" not in {t.value for t in home.state}, unit


def test_the_store_holds_them_once(tmp_path: Path) -> None:
    model, optimizer = wrap(tmp_path, "disk" if CPU == "cpu" else "device")
    with optimizer:
        step(model, optimizer, 0)
        optimizer.commit()
        taken = (tmp_path / "overspill.store").stat().st_blocks * 512
        assert abs(taken - optimizer.plan.disk_bytes) <= 64 << 10
        layout = optimizer.plan.detail.layout
        assert layout.spare_bytes > 0.4 * optimizer.plan.disk_bytes


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_is_committed_whole_or_not_at_all(place: str, tmp_path: Path) -> None:
    """The extent of the last commit is not written over: a copy of the disk amid it has the old."""
    model, optimizer = wrap(tmp_path / "store", place)
    name = "1.base.weight"
    with optimizer:
        step(model, optimizer, 0)
        optimizer.commit()
        before = model.state_dict()[name].clone()
        with overspill.materialized(model, writeback=True), torch.no_grad():
            dict(model.named_parameters())[name].add_(1.0)
        shutil.copytree(tmp_path / "store", tmp_path / "amid")
        optimizer.commit()
        shutil.copytree(tmp_path / "store", tmp_path / "after")
        step(model, optimizer, 1)
        optimizer.commit()
    for folder, expected in (("amid", before), ("after", before + 1), ("store", before + 1)):
        again = build()
        options = {**PLACES[place], "rates": RATES}
        resumed, _ = overspill.resume(again, tmp_path / folder, **options)
        with resumed:
            assert torch.equal(again.state_dict()[name], expected), folder
            step(again, resumed, 2)
            resumed.commit()


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_that_finds_no_room_on_disk_can_be_made_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrap(tmp_path, place)
    name = "1.base.weight"

    def full(*_: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with optimizer:
        step(model, optimizer, 0)
        before = model.state_dict()[name].clone()
        with monkeypatch.context() as patch:
            patch.setattr(store_file, "reserve", full)
            with pytest.raises(overspill.IoError, match="No space left"), torch.no_grad():
                model.load_state_dict({**model.state_dict(), name: before + 1})
        assert torch.equal(model.state_dict()[name], before)
        model.load_state_dict({**model.state_dict(), name: before + 1})
        step(model, optimizer, 1)
        optimizer.commit()
    again = build()
    with overspill.resume(again, tmp_path, **PLACES[place], rates=RATES)[0]:
        assert torch.equal(again.state_dict()[name], before + 1)


def test_a_copy_that_became_sparse_has_its_room_again(tmp_path: Path) -> None:
    """But not the second extents of what is frozen."""
    place = next(iter(PLACES))
    model, optimizer = wrap(tmp_path / "store", place)
    with optimizer:
        step(model, optimizer, 0)
        spare = optimizer.plan.detail.layout.spare_bytes
        disk = optimizer.plan.disk_bytes
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    file = tmp_path / "copy" / "overspill.store"
    data = file.read_bytes()
    file.unlink()
    with file.open("wb") as copy:  # as tools do that keep holes
        copy.truncate(len(data))
        for at in range(0, len(data), 4096):
            if any(block := data[at : at + 4096]):
                copy.seek(at)
                copy.write(block)
    assert file.stat().st_blocks * 512 < disk  # extents that were never written
    again = build()
    with overspill.resume(again, tmp_path / "copy", **PLACES[place], rates=RATES)[0] as resumed:
        taken = file.stat().st_blocks * 512
        assert disk <= taken <= disk + (64 << 10) < disk + spare
        step(again, resumed, 1)
