"""Limits of the system are met by ``wrap``, not in the middle of a run."""

from __future__ import annotations

import subprocess
import sys

from tests.devices import about_sim

SCRIPT = """
import resource, sys
import torch
import overspill
from overspill.planning.budgets import free_host_bytes
from tests.models import TinyLM, adamw, train

used = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = int(used.split()[1]) * 1024 + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
options = {"device": "sim", "rates": overspill.Rates(), "activations": "host"}
model = TinyLM()
for host in ("8GiB", "auto"):
    try:
        optimizer = overspill.wrap(model, adamw(model), host_memory=host, **options)
    except overspill.OffloadError as error:
        print(host, "refused:", error)
    else:
        with optimizer:
            train(model, optimizer, 2)
            print(host, "trained with", optimizer.memory["host"].budget_bytes < 2 << 30)
"""


@about_sim
def test_a_limit_on_address_space() -> None:
    """``ulimit -v``, which some batch systems set: activations asked for what is not there."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("8GiB refused: host memory: no address range of 85")
    assert "ulimit -v" in first
    assert second == "auto trained with True"
