"""How long an engine lives: as long as its model or its optimizer, and no longer."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.devices import CPU, SIM, about_sim
from tests.models import TinyLM, adamw, batch, train, weights

PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "700KiB", "host_memory": "64MiB"},
}
if CPU == "cpu":
    PLACES["disk"] = {"device": CPU, "host_memory": "1500KiB"}


def wrapped(path: Path, place: str, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = TinyLM()
    options = {**PLACES[place], "nvme": path, "rates": overspill.Rates(), **more}
    return model, overspill.wrap(model, adamw(model), **options)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("overspill")]


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("durable", [True, False])
def test_a_model_outlives_its_optimizer(
    durable: bool, place: str, update: Any, tmp_path: Path
) -> None:
    """As a function returns it that has trained it; then nobody has it, and all goes."""

    def trained() -> Any:
        model, optimizer = wrapped(tmp_path, place, update=update, durable=durable)
        train(model, optimizer, 3)
        return model

    model = trained()
    gc.collect()
    with torch.no_grad():
        assert model(*batch(0)).isfinite()
    found, alive = weights(model), weakref.ref(model)
    assert threads()
    del model
    gc.collect()
    assert alive() is None and not threads()
    if not durable:
        assert not any(tmp_path.iterdir())
        return
    again = TinyLM()
    optimizer, _ = overspill.resume(again, tmp_path, device=CPU, rates=overspill.Rates())
    with optimizer:
        assert optimizer.step_count == 3
        assert all(torch.equal(v.cpu(), found[n].cpu()) for n, v in weights(again).items())


def test_an_ordinary_model_comes_back_when_the_optimizer_is_gone(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, "device", durable=False)
    train(model, optimizer, 2)
    found = weights(model)
    del optimizer
    gc.collect()
    overspill.unwrap(model)
    assert all(torch.equal(v, found[n]) for n, v in model.state_dict().items())
    assert not threads()


def test_who_holds_whom_does_not_matter(tmp_path: Path) -> None:
    """A model that has its optimizer, as modules of trainers do, goes with it."""
    model, optimizer = wrapped(tmp_path, "device")
    model.optimizer, optimizer.model = optimizer, model
    train(model, optimizer, 2)
    del model, optimizer
    gc.collect()
    assert not threads()


def test_what_nobody_has_makes_room_for_the_next(tmp_path: Path) -> None:
    gc.disable()
    counts = []
    try:
        for _ in range(3):
            model, optimizer = wrapped(tmp_path, "device", durable=False)
            train(model, optimizer, 1)
            counts.append(len(threads()))
            del model, optimizer
        assert max(counts) == counts[0], "the threads of one engine"
    finally:
        gc.enable()
        gc.collect()


def test_a_store_that_nobody_has_any_more_is_resumed(tmp_path: Path) -> None:
    gc.disable()
    try:
        model, optimizer = wrapped(tmp_path, "device")
        train(model, optimizer, 2)
        del model, optimizer
        again = TinyLM()
        resumed, _ = overspill.resume(again, tmp_path, device=CPU, rates=overspill.Rates())
        with resumed:
            assert resumed.step_count == 2
    finally:
        gc.enable()


SCRIPT = """
import sys
import overspill
from tests.parity.test_lifetimes import *

held = sys.argv[2]
model, optimizer = wrapped(Path(sys.argv[1]), "device", commit_every=100)
train(model, optimizer, 3)
if held == "model":
    del optimizer
elif held == "cycle":
    gc.disable()
    model.optimizer = optimizer
    del model, optimizer
"""


@about_sim
@pytest.mark.parametrize("held", ["both", "model", "cycle"])
def test_a_script_that_ends_has_committed_its_last_step(held: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), held],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    model = TinyLM()
    optimizer, _ = overspill.resume(model, tmp_path, device=CPU, rates=overspill.Rates())
    with optimizer:
        assert optimizer.step_count == 3
