"""The checkpoint suite's parts: a copy that moves what it is told, and a store made, exported and
come back to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import disk_copy
from benchmarks.checkpoint_worker import Job
from benchmarks.model import Shape

TINY = Shape(layers=2, width=32, heads=2, vocabulary=64, batch=2, tokens=16)


def test_a_copy_reads_and_writes_as_much_as_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 4096 * 8)  # two blocks
    moved = {"preadv": 0, "pwritev": 0}
    for name in moved:
        real = getattr(disk_copy.os, name)

        def count(fd: int, data: list[memoryview], at: int, name: str = name, real=real) -> int:  # type: ignore[no-untyped-def]
            done: int = real(fd, data, at)
            moved[name] += done
            return done

        monkeypatch.setattr(disk_copy.os, name, count)
    assert disk_copy.copy_s(source, 5 << 20, target, 9 << 20) > 0
    assert moved == {"preadv": 5 << 20, "pwritev": 9 << 20}
    assert not target.exists()


def test_a_store_is_trained_exported_and_resumed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    job = Job({"shape": asdict(TINY), "store": str(store), "host_memory": 64 << 20})
    held = job.answer({"do": "train"})["held_bytes"]
    seen = job.answer({"do": "export", "out": str(tmp_path / "out")})
    assert seen["written_bytes"] > held > 0 and seen["seconds"] > 0
    back = job.answer({"do": "resume"})
    assert back["resume_s"] > 0 and back["rollback_s"] > 0
