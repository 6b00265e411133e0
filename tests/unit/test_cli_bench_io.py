"""``overspill bench io``: its table, its JSON, its picture, and what it remembers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overspill.cli.app import app
from overspill.io_engine import IoEngine
from overspill.io_engine.backend import Tuning

SMALL = ("--size", "1MiB", "--rounds", "1", "--block", "64KiB", "--depth", "2", "--depth", "4")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))


def bench(directory: Path, *more: object) -> Any:
    """Runs the command with few and small transfers."""
    arguments = ["bench", "io", "--dir", directory, *SMALL, *more]
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_bench_prints_a_table_and_the_engine_follows_it(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    result = bench(place, "--backend", "threads")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "│ threads" in line]
    assert len(rows) == 2 and all("64 KiB" in row and row.count(" / ") == 4 for row in rows)
    assert "best: threads, blocks of 64 KiB, " in result.output
    assert f"kept in {tmp_path / 'cache'}" in result.output
    with IoEngine(place, 1 << 20) as engine:
        assert (engine.tuning.backend, engine.tuning.block_bytes) == ("threads", 65536)
    assert list(place.iterdir()) == []


def test_json_tells_all_and_nothing_is_kept_when_so_wished(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "out"
    result = bench(tmp_path, "--json", "--no-keep", "--no-checksum", "--out", out)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == json.loads((out / "io.json").read_text())
    assert told["kept_in"] is None and not (tmp_path / "cache").exists()
    assert told["checksum"] is False and told["nbytes"] == 1 << 20
    assert told["machine"]["cores"] >= 1
    assert {m["mode"] for m in told["measurements"]} == {"read", "write", "both"}
    assert {m["tuning"]["queue_depth"] for m in told["measurements"]} == {2, 4}
    assert Tuning(**told["best"]) in {Tuning(**m["tuning"]) for m in told["measurements"]}
    assert (out / "io.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("obstacle", ["a file in its place", "no matplotlib"])
def test_what_cannot_be_kept_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    out = tmp_path / "out"
    if obstacle == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    else:
        out.write_text("")
    monkeypatch.setattr("overspill.io_engine.bench.bench", lambda *_, **__: pytest.fail("measured"))
    result = bench(tmp_path, "--out", out)
    assert result.exit_code == 2, result.output
    assert "error: " in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--size", "much"), "--size: cannot read 'much'"),
        (("--size", "0"), "--size: '0' is no size to move"),
        (("--block", "5000"), "multiple of 4096"),
        (("--depth", "0"), "queue_depth must be 1 to 1024"),
        (("--backend", "magic"), "backend must be"),
        (("--rounds", "0"), "at least one round"),
        (("--dir", "nowhere"), "nowhere: does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    result = bench(tmp_path, *more)
    assert result.exit_code == 2, result.output
    assert words in result.output and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
