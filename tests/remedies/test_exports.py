"""Remedies of what is said about exports, copies of stores, and stores that do not fit a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.durable import export, inspect, moving
from overspill.io_engine import IoEngine
from overspill.io_engine.committed import own_store
from overspill.io_engine.manifest import MANIFEST_NAME, RecordKind, read_manifest
from overspill.io_engine.store_file import STORE_NAME
from tests.devices import CPU, about_files
from tests.remedies.table import (
    adamw,
    net,
    plain_run,
    run_script,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip

pytestmark = about_files

MIB = 1 << 20


def made(folder: Path, steps: int = 2) -> Any:
    """A store with a few commits, and what the model was then."""
    model = net()
    with wrapped(model, nvme=folder) as optimizer:
        for number in range(steps):
            step(model, optimizer, number)
    return plain_run(steps)


def spoil(folder: Path) -> None:
    """Damage every commit of a store, each followed by a whole record."""
    found = read_manifest(folder)
    assert found is not None
    commits = [each for each in found.log.records if each.kind == RecordKind.COMMIT]
    with (folder / MANIFEST_NAME).open("r+b") as log:
        for each in commits:
            log.seek(each.offset)
            log.write(b"\x01" * 64)


def command(*words: Any, code: int = 0) -> str:
    """Run ``overspill`` with these words; what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@tries("offload/durable/export.py", "there; make room, export elsewhere, or leave the optimizer's")
def test_an_export_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    expected = made(store)
    weights = sum(p.nbytes for p in expected.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(export, "free_bytes_at", lambda path: 2 * weights)
        with says("make room, export elsewhere, or leave the optimizer's state out"):
            export.export_store(store, out)
        export.export_store(store, out, optimizer=False)
    export.export_store(store, tmp_path / "elsewhere")
    for each in (out, tmp_path / "elsewhere"):
        model = net(seed=1)
        with wrapped(model, weights=each):
            same(model, expected)


@tries("io_engine/committed.py", "no commit is complete; start from an export")
@tries("offload/durable/inspect.py", ": no commit is complete; start from an export")
def test_a_store_without_a_whole_commit(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    expected = made(store)
    export.export_store(store, out)
    spoil(store)
    model = net(seed=1)
    with says("no commit is complete; start from an export"):
        overspill.resume(model, store, adamw(model), device=CPU)
    with says("no commit is complete; start from an export"):
        inspect.repair_store(store)
    with wrapped(model, weights=out) as optimizer:
        optimizer.load_state_dict(out)
        same(model, expected)
        trains(model, optimizer, first=2)


@tries("offload/durable/inspect.py", "try again when the run has ended, or call optimizer.save(")
def test_an_export_beside_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    store.mkdir()
    model = net()
    unmoved = inspect.require_unmoved
    with wrapped(model, nvme=store, checksum=False) as optimizer:

        def committed(*given: Any) -> None:
            step(model, optimizer)
            optimizer.commit()
            found = inspect.find_store(store)
            unmoved(given[0], given[1], found)

        step(model, optimizer)
        optimizer.commit()
        monkeypatch.setattr(export, "require_unmoved", committed)
        with says("try again when the run has ended, or call optimizer.save(path) in it"):
            export.export_store(store, tmp_path / "out")
        monkeypatch.undo()
        optimizer.save(tmp_path / "saved")
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    export.export_store(store, tmp_path / "out")
    for each in ("saved", "out"):
        other = net(seed=1)
        with wrapped(other, weights=tmp_path / each):
            assert all(torch.equal(v, expected[n]) for n, v in other.state_dict().items())


@tries("offload/durable/moving.py", ": another process has taken the copy; try again")
def test_a_copy_that_another_process_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for each in (one, two, other):
        each.mkdir()
    expected = made(one)
    made(other)
    own = moving.own_store

    def theirs(directories: Any) -> Any:
        if list(directories) != [two]:
            return own(directories)
        return own([other])

    model = net(seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(moving, "own_store", theirs)
        with says("another process has taken the copy; try again"):
            overspill.resume(model, one, adamw(model), nvme=two, device=CPU)
    for each in two.iterdir():  # that process has ended, and left nothing
        each.unlink()
    model = net(seed=1)
    optimizer, _ = overspill.resume(model, one, adamw(model), nvme=two, device=CPU)
    same(model, expected)
    optimizer.close()


@tries("offload/durable/resume.py", "not {}; leave {} out", "not {}; leave checksum out")
@tries("offload/schedule/describe.py", "otherwise; use frozen= and resident= of the")
def test_other_formats_than_the_stores(tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        model[0].requires_grad_(requires_grad=False)
        return model

    def resumed(**options: Any) -> None:
        model = made()
        overspill.resume(model, tmp_path, adamw(model), device=CPU, **options)[0].close()

    with wrapped(made(), nvme=tmp_path, frozen="int8") as optimizer:
        optimizer.commit()
    with says("the store was made with moments='fp32', not 'int8'; leave moments out"):
        resumed(moments="int8")
    with says("the store was made with checksum=True, not False; leave checksum out"):
        resumed(checksum=False)
    with says("its frozen weights are kept otherwise; use frozen= and resident= of the store"):
        resumed(resident=["0"])
    resumed()


@tries("offload/durable/sums.py", "export again, or copy it again")
def test_an_export_that_is_damaged(tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    model = net()
    with wrapped(model, nvme=place) as optimizer:
        step(model, optimizer)
    command("export", place, out)
    whole = tmp_path / "whole"
    shutil.copytree(out, whole)
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "export again, or copy it again" in command("inspect", out, code=1)
    shutil.copy(whole / file.name, file)
    command("inspect", out)
    shutil.rmtree(out)
    command("export", place, out)
    command("inspect", out)
    other = net(seed=1)
    other.load_state_dict(load_file(file))
    same(other, plain_run(1))


@tries("offload/schedule/describe.py", "set precision= as the store was made with")
def test_a_store_of_other_formats(tmp_path: Path) -> None:
    model = net()
    with wrapped(model.bfloat16(), nvme=tmp_path) as optimizer:
        step(model, optimizer)
    other = net(seed=1)
    with says("set precision= as the store was made with"):
        overspill.resume(other, tmp_path, adamw(other), device=CPU)
    other = net(seed=1).bfloat16()
    optimizer, _ = overspill.resume(other, tmp_path, adamw(other), device=CPU)
    with optimizer:
        trains(other, optimizer, 1)


@tries("offload/state/unmanaged.py", "build the model as it was then")
def test_a_commit_of_another_model(tmp_path: Path) -> None:
    """A buffer that the commit has is built again."""
    model = net()
    model.register_buffer("extra", torch.ones(3))
    with wrapped(model, nvme=tmp_path) as optimizer:
        step(model, optimizer)
    other = net(seed=1)
    with says("build the model as it was then"):
        overspill.resume(other, tmp_path, adamw(other), device="cpu")
    other.register_buffer("extra", torch.zeros(3))
    optimizer, _ = overspill.resume(other, tmp_path, adamw(other), device="cpu")
    with optimizer:
        assert torch.equal(other.extra, torch.ones(3))
        expected = plain_run(1)
        expected.register_buffer("extra", torch.ones(3))
        same(other, expected)


@about_files
@tries("offload/open_engines.py", "close it with overspill.unwrap({}), or choose another folder")
def test_a_store_in_use(tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    model = net()
    first = wrapped(model, nvme=place)
    second = net()
    with says(f"close it with overspill.unwrap({str(place)!r}), or choose another folder (nvme=)"):
        wrapped(second, nvme=place)
    with wrapped(second, nvme=other) as optimizer:
        trains(second, optimizer)
    step(model, first)
    overspill.unwrap(str(place))
    model = net(seed=1)
    optimizer, _ = overspill.resume(model, place, adamw(model), device="cpu")
    with optimizer:
        same(model, plain_run(1))


@tries("io_engine/ownership.py", "; choose another directory, or")
@tries("io_engine/committed.py", "resume; wrap the model to start a new run")
def test_stores_of_others(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    model = net()
    with wrapped(model, nvme=one) as optimizer:
        step(model, optimizer)
        with says("choose another directory, or close its store first"), IoEngine(one, MIB):
            pass
        with IoEngine(two, MIB):
            pass
    begun = tmp_path / "begun"
    begun.mkdir()
    run_script(f"""
        import os
        from tests.remedies.table import net, wrapped
        optimizer = wrapped(net(), nvme={str(begun)!r})
        os._exit(0)
    """)
    model = net()
    with says(
        "was never committed, so there is nothing to resume; wrap the model to start a new run"
    ):
        overspill.resume(model, begun, adamw(model), device=CPU)
    with wrapped(model, nvme=begun) as optimizer:
        step(model, optimizer)


@tries("io_engine/committed.py", ": another process has made a new store here; try again")
def test_a_store_that_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.io_engine import committed

    one, two = tmp_path / "one", tmp_path / "two"
    for each in (one, two):
        each.mkdir()
        model = net()
        with wrapped(model, nvme=each) as optimizer:
            step(model, optimizer)
    find, found = committed.find_store, []

    def replaced(paths: Any) -> Any:
        found.append(paths)
        return find(two if len(found) == 2 else paths)

    monkeypatch.setattr(committed, "find_store", replaced)
    with says("another process has made a new store here; try again"):
        own_store(one)
    own_store(one).locks.release()


@tries("io_engine/reading.py", "has; restore the store from a copy, or start from an")
def test_a_store_whose_data_changed(tmp_path: Path) -> None:
    store, copy, out = (tmp_path / name for name in ("store", "copy", "out"))
    store.mkdir()
    model = net()
    with wrapped(model, nvme=store) as optimizer:
        step(model, optimizer)
        optimizer.commit()
        optimizer.save(out)
    shutil.copytree(store, copy)
    data = bytearray((store / STORE_NAME).read_bytes())
    data[:] = bytes(each ^ 255 for each in data)
    (store / STORE_NAME).write_bytes(data)
    from overspill.durable.export import export_store

    with says("restore the store from a copy, or start from an export"):
        export_store(store, tmp_path / "no")
    expected = plain_run(1)
    again = net(seed=1)
    optimizer, _ = overspill.resume(again, copy, adamw(again), device=CPU)
    same(again, expected)
    optimizer.close()
    again = net(seed=1)
    with wrapped(again, weights=out):
        same(again, expected)


@tries("offload/durable/commits.py", "make it again, or call rollback()")
@pytest.mark.parametrize("way", ["again", "rollback"])
def test_an_edit_that_is_interrupted(way: str, tmp_path: Path) -> None:
    model = net()
    with wrapped(model, nvme=tmp_path) as optimizer:
        step(model, optimizer)
        optimizer.commit()
        weights = {name: value.clone() for name, value in model.state_dict().items()}

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model[1].register_load_state_dict_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model.load_state_dict(weights)
        handle.remove()
        with says("make it again, or call rollback()"):
            optimizer.commit()
        if way == "again":
            model.load_state_dict(weights)
        else:
            optimizer.rollback()
        optimizer.commit()
        step(model, optimizer, 1)
        same(model, plain_run(2))


@tries("offload/durable/files.py", "use torch.save(model.state_dict(), path) instead")
def test_a_tensor_that_the_format_cannot_hold(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    model = net()
    model.register_buffer("turns", torch.ones(3, dtype=torch.complex128))
    with wrapped(model, nvme=place) as optimizer:
        step(model, optimizer)
        with says("use torch.save(model.state_dict(), path) instead"):
            optimizer.save(tmp_path / "out")
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        other = net(seed=1)
        other.register_buffer("turns", torch.zeros(3, dtype=torch.complex128))
        other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        same(other, model)
