"""``overspill inspect`` for scripts, and its repair: asked for, never on its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.io_engine.manifest import MANIFEST_NAME, RecordKind, read_manifest
from overspill.io_engine.store_file import STORE_NAME
from tests.devices import CPU
from tests.resumed import adamw, assert_same, build, options, train, weights


@pytest.fixture
def store(tmp_path: Path) -> Path:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 3)
    return tmp_path


def damage_last_commit(store: Path) -> None:
    """Behind it stands its seal, so it was whole once."""
    found = read_manifest(store)
    assert found is not None
    last = [record for record in found.log.records if record.kind == RecordKind.COMMIT][-1]
    data = bytearray((store / MANIFEST_NAME).read_bytes())
    data[last.offset + 100] ^= 1
    (store / MANIFEST_NAME).write_bytes(data)


def test_json_tells_commits_and_damage(store: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(store), "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["wrong"] == []
    assert [commit["step"] for commit in told["commits"]] == [0, 1, 2, 3]
    assert told["verified_bytes"] > 0
    damage_last_commit(store)
    done = CliRunner().invoke(app, ["inspect", str(store), "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and "a record at offset" in told["wrong"][0]
    assert told["commits"][-1]["step"] == 2


def test_repair_asks_first(store: Path) -> None:
    damage_last_commit(store)
    before = (store / MANIFEST_NAME).read_bytes()
    done = CliRunner().invoke(app, ["inspect", str(store), "--repair"], input="n\n")
    assert done.exit_code == 1
    assert (store / MANIFEST_NAME).read_bytes() == before
    with pytest.raises(overspill.CorruptionError, match="generation 3, step 2"):
        overspill.resume(build(), store, device=CPU, rates=overspill.Rates())


def test_training_goes_on_from_what_a_repair_leaves(store: Path, tmp_path: Path) -> None:
    """The data of the last whole commit is there still; the end has the same bits."""
    damage_last_commit(store)
    done = CliRunner().invoke(app, ["inspect", str(store), "--repair", "--yes"])
    assert done.exit_code == 0
    assert "the store is at generation 3, step 2" in done.output
    (tmp_path / "whole").mkdir()
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path / "whole")) as optimizer:
        train(model, optimizer, 4)
        wanted = weights(model)
    settings = options(store)
    del settings["nvme"]
    model = build()
    optimizer, _ = overspill.resume(model, store, adamw(model), **settings)
    with optimizer:
        assert optimizer.step_count == 2
        train(model, optimizer, 4)
        assert_same(weights(model), wanted)


def test_data_that_is_gone_is_not_repaired(store: Path) -> None:
    """Records cannot mend data: then nothing is changed."""
    damage_last_commit(store)
    before = (store / MANIFEST_NAME).read_bytes()
    (store / STORE_NAME).write_bytes(bytes((store / STORE_NAME).stat().st_size))
    done = CliRunner().invoke(app, ["inspect", str(store), "--repair", "--yes"])
    assert done.exit_code == 2 and "nothing was changed" in done.output
    assert (store / MANIFEST_NAME).read_bytes() == before


def test_without_checksums_nothing_is_repaired(tmp_path: Path) -> None:
    """The extents of the commit before may have been written over, and nobody could tell."""
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path, checksum=False)) as optimizer:
        train(model, optimizer, 3)
    damage_last_commit(tmp_path)
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--repair", "--yes"])
    assert done.exit_code == 2 and "checksum=False" in done.output.replace("\n", " ")
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before
