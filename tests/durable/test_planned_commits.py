"""Commits write nothing twice, and the plan knows what they write."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.io_engine import Extent, IoEngine
from tests.devices import about_cpu
from tests.resumed import adamw, build, options, train

STEPS = 6


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("memory", ["700KiB", "64MiB"])
def test_every_step_writes_all_state_once(
    tmp_path: Path, memory: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No extra state bytes: with a commit a step, every part of weights and state is
    written once a step, wherever it lives; what lives in memory is in the plan's bytes too."""
    written: Counter[Extent] = Counter()
    real = IoEngine.write

    def write(self: IoEngine, extent: Extent, *arguments: Any, **more: Any) -> Any:
        written[extent] += 1
        return real(self, extent, *arguments, **more)

    model = build()
    settings = options(tmp_path, host_memory=memory, update=update)
    with overspill.wrap(model, adamw(model), **settings) as optimizer:
        train(model, optimizer, 2)
        optimizer.commit()
        monkeypatch.setattr(IoEngine, "write", write)
        train(model, optimizer, 2 + STEPS)
        optimizer.commit()
        runtime = optimizer._engine.runtime
        items = runtime.layout.stored
        counts = {
            i: sum(written[runtime.store.extents.of(i, role)] for role in (0, 1)) for i in items
        }
        assert set(counts.values()) == {STEPS}
        if memory == "64MiB":  # all lives in memory
            need = sum(runtime.store.extents.of(item, 0).nbytes for item in items)
            assert optimizer.plan.link_bytes["write"] == need


@about_cpu
def test_fewer_commits_write_less(tmp_path: Path) -> None:
    def planned(**more: Any) -> int:
        model = build()
        plan = overspill.plan(model, adamw(model), **options(tmp_path, **more))
        return plan.link_bytes["write"]

    alone = planned(durable=False)
    once = planned() - alone
    assert once > 0
    assert planned(commit_every=4) - alone == once // 4
