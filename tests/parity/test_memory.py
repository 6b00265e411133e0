"""What the engine says it holds and moves is what the process really holds and moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20

# The C library gives freed memory back at once, so that resident means held.
RETURN_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}

CHILD = """
import json, sys
import psutil, torch
import overspill
from tests.models import TinyLM, adamw, batch, train

folder, options = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
process = psutil.Process()

def counters():
    io = process.io_counters()
    return io.read_bytes, io.write_bytes

def run(width, depth, steps, **more):
    with overspill.empty_init():
        model = TinyLM(width=width, depth=depth)
    before = process.memory_info().rss
    optimizer = overspill.wrap(model, adamw(model), nvme=folder, **more)
    figures = []
    for step in range(steps):
        start = counters()
        train(model, optimizer, 1)
        end = counters()
        figures.append({"read": end[0] - start[0], "write": end[1] - start[1]})
    held = sum(optimizer.memory[t].held_bytes for t in ("device", "host"))
    full = sum(p.numel() for p in model.parameters()) * 12
    rss = process.memory_info().rss - before
    result = {"rss": rss, "held": held, "full": full, "steps": figures,
              "plan": dict(optimizer.plan.link_bytes),
              "stats": {k: v.bytes for k, v in optimizer.stats.lanes.items()},
              "budgets": {t.value: [m.budget_bytes, m.peak_bytes]
                          for t, m in optimizer.memory.items()}}
    optimizer.close()
    result["after_close"] = process.memory_info().rss - before
    return result

run(64, 2, 2, device=options["device"])  # what the first use of everything costs
print(json.dumps(run(512, 12, 4, **options)))
"""


def child(tmp_path: Path, **options: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), json.dumps(options)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
        env={**os.environ, **RETURN_AT_ONCE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_held_bytes_are_resident_bytes_and_traffic_is_the_plans(
    device: str, update: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"device": device, "host_memory": "48MiB", "update": update}
    if device == "sim":
        options["device_memory"] = "24MiB"
    result = child(tmp_path, **options)
    assert result["full"] > 4 * result["held"], "the model must not fit"
    for budget, peak in result["budgets"].values():
        assert peak <= budget
    assert abs(result["rss"] - result["held"]) < 64 * MIB, result
    assert result["after_close"] < 64 * MIB, result
    for lane in ("read", "write"):
        for step in result["steps"][2:]:
            # Updates run beside compute: a step's last writes may end in the next one, and a unit
            # that comes late may be read once more.
            assert 0.8 < step[lane] / result["plan"][lane] < 1.25, (lane, result)
        assert result["stats"][lane] == pytest.approx(result["steps"][-1][lane], rel=0.2)
