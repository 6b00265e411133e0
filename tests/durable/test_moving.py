"""A store is resumed in other directories: other stripes, other records, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.durable.inspect import inspect_store
from overspill.io_engine.committed import find_store
from overspill.io_engine.manifest import Manifest
from tests.resumed import adamw, assert_same, build, options, train, weights, whole_run


def cut_run(folders: list[Path], **more: Any) -> None:
    for folder in folders:
        folder.mkdir()
    model = build()
    with overspill.wrap(model, adamw(model), **options(folders, **more)) as optimizer:
        torch.manual_seed(5)
        train(model, optimizer, 3, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))


def goes_on(path: Path, wanted: Any, **settings: Any) -> None:
    model = build()
    optimizer, _ = overspill.resume(model, path, adamw(model), **settings)
    with optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        schedule.last_epoch = 3
        for group in optimizer.param_groups:
            group["lr"] = 0.005
        train(model, optimizer, 6, schedule)
        assert_same(weights(model), wanted)


FORMATS: list[dict[str, Any]] = [
    {}, {"precision": "bf16", "moments": "int8"}, {"precision": "bf16", "moments": "bf16"}
]  # fmt: skip


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f.get("moments", "fp32"))
def test_other_stripes_and_records(
    tmp_path: Path, formats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed under other stripe counts, and with records of another size,
    training ends with the very bits of a run that was never cut."""
    monkeypatch.setenv("OVERSPILL_VALIDATE", "1")
    wanted, _ = whole_run(tmp_path / "whole", **formats)
    first = [tmp_path / name for name in "ab"]
    cut_run(first, **formats)
    places = {"one": [tmp_path / "c"], "three": [tmp_path / name for name in "def"]}
    memory = {"one": "560KiB", "three": "64MiB"}
    largest = {"one": 4096, "three": 2560}  # elements of a record; 9216 before
    for name, folders in places.items():
        for folder in folders:
            folder.mkdir()
        monkeypatch.setattr("overspill.planning.subgroups.LARGEST_NUMEL", largest[name])
        settings = options(folders, host_memory=memory[name], **formats)
        goes_on(first[0], wanted, **settings)
        assert inspect_store(folders[0]).commits[-1].step == 6
        assert len(inspect_store(folders[0]).directories) == len(folders)
        assert not inspect_store(folders[0]).wrong
        units = find_store(folders).layout.description["units"]
        assert max(s["count"] for u in units for s in u["subgroups"]) == largest[name]
    assert inspect_store(first[1]).commits[-1].step == 3  # as it was


def test_a_copy_that_fails_leaves_the_store_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = whole_run(tmp_path / "whole")
    cut_run([tmp_path / "a"])
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    settings = options([tmp_path / "b", tmp_path / "c"])
    with monkeypatch.context() as patched:

        def full(*_: Any, **_more: Any) -> None:
            raise overspill.IoError("no space left", path="b")

        patched.setattr(Manifest, "commit", full)
        with pytest.raises(overspill.IoError, match="no space left"):
            goes_on(tmp_path / "a", wanted, **settings)
    assert [*(tmp_path / "b").glob("*.store"), *(tmp_path / "b").glob("*.manifest")] == []
    goes_on(tmp_path / "a", wanted, **settings)


def test_a_directory_of_the_store_itself_is_refused(tmp_path: Path) -> None:
    cut_run([tmp_path / "a"])
    (tmp_path / "b").mkdir()
    model = build()
    nvme = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ValueError, match="directories without it"):
        overspill.resume(model, tmp_path / "a", adamw(model), nvme=nvme, rates=overspill.Rates())
