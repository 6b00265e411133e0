"""What autograd saved, on a disk that makes mistakes: the right bits, or an error; no hang, and
nothing left.

A failure names its seed, and ``python -m tests.robust.test_saved_faults SEED`` plays it again.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
import overspill.movement.store
from overspill.activations import offloader
from overspill.io_engine import IoEngine
from overspill.io_engine.native import NATIVE
from tests.devices import CPU, SIM, normal
from tests.faults import faulty_disk
from tests.models import adamw, weights
from tests.sim.io_scenario import faults_of

pytestmark = pytest.mark.skipif(NATIVE is None, reason="simulated disks need the extension")

WIDTH, TOKENS, LAYERS, STEPS = 32, 48, 4, 3
PLACES: list[dict[str, Any]] = [
    {"device": CPU, "host_memory": "600KiB"},
    {"device": SIM, "device_memory": "400KiB", "host_memory": "700KiB"},
]


def train(folder: Path, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    losses = []
    torch.manual_seed(1)
    with overspill.wrap(model, adamw(model), nvme=folder, durable=False, **options) as optimizer:
        for step in range(STEPS):
            loss = model(normal(step, 2, TOKENS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights(model)


@functools.cache
def wanted(place: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        ample = {key: "64MiB" for key in PLACES[place] if key != "device"}
        options = {"device": PLACES[place]["device"], **ample, "activations": "keep"}
        return train(Path(folder), options)


def play(seed: int, folder: Path, patch: pytest.MonkeyPatch) -> str:
    """The name of the error that the run ended with; ``right``: it ended well."""
    rng = random.Random(seed)
    place = rng.randrange(len(PLACES))
    policy = rng.choice(["nvme", "nvme", "auto"])
    options = {**PLACES[place], "activations": policy}
    disk = functools.partial(IoEngine, backend=faulty_disk(faults_of(seed)))
    patch.setattr(overspill.movement.store, "IoEngine", disk)
    patch.setattr(offloader, "LEAST_BYTES", 1 << 10)
    try:
        losses, found = train(folder, options)
    except overspill.OffloadError as error:
        return type(error).__name__
    want_losses, want = wanted(place)
    assert losses == want_losses
    assert all(torch.equal(found[name], value) for name, value in want.items())
    return "right"


@pytest.mark.searches
@pytest.mark.parametrize(
    "seeds", [15, pytest.param(2_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_seeded_mistakes_under_activations(
    seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(len(PLACES)):
        wanted(place)
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder, monkeypatch.context() as patch:
            try:
                seen[play(seed, Path(folder), patch)] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {faults_of(seed)}: {error!r}") from error
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors, seed
        assert threading.active_count() == threads, seed
    assert set(seen) <= {"right", "IoError", "CorruptionError"}, seen
    assert seen["right"] > seeds / 8 and seen["IoError"] and seen["CorruptionError"], seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patching:
        print(play(int(sys.argv[1]), Path(made), patching))
