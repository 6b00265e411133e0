"""The log is written anew when it has grown, and the disk fails in the middle of that."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.io_engine.manifest import MANIFEST_NAME, read_manifest
from tests.resumed import adamw, assert_same, build, options, train, weights

STEPS = 14


def whole(path: Path) -> Any:
    path.mkdir()
    model = build()
    with overspill.wrap(model, adamw(model), **options(path)) as optimizer:
        train(model, optimizer, STEPS)
        return weights(model)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_the_old_log_stays_whole(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space in the middle of a commit: one clear error, the last generation is whole,
    and once there is space the run ends with the same bits."""
    monkeypatch.setattr("overspill.io_engine.manifest.LARGEST_LOG_BYTES", 0)
    wanted = whole(tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    model = build()
    optimizer = overspill.wrap(model, adamw(model), **options(tmp_path / "cut"))
    train(model, optimizer, 2)
    optimizer.commit()
    real = getattr(os, call)

    def broken(target: Any, *arguments: Any) -> Any:
        path = target if call == "replace" else os.readlink(f"/proc/self/fd/{target}")
        if os.path.basename(path) == MANIFEST_NAME + ".new":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(target, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, broken)
        with pytest.raises(overspill.IoError, match="cannot write: No space left"):
            train(model, optimizer, STEPS)
            optimizer.commit()
        optimizer.close()
    assert not (tmp_path / "cut" / (MANIFEST_NAME + ".new")).exists()
    found = read_manifest(tmp_path / "cut")
    assert found is not None and not found.damage
    assert 2 < found.generations[-1].step < STEPS  # those that went to the log as it was
    settings = options(tmp_path / "cut")
    del settings["nvme"]
    model = build()
    optimizer, _ = overspill.resume(model, tmp_path / "cut", adamw(model), **settings)
    with optimizer:
        assert optimizer.step_count == found.generations[-1].step
        train(model, optimizer, STEPS)
        assert_same(weights(model), wanted)
