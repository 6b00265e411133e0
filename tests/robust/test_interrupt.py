"""Ctrl-C in any phase ends a run cleanly: no hang, no thread, no file left behind."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.devices import CPU, DEVICE, SIM
from tests.patience import WAIT_S

CHILD = """
import faulthandler, os, signal, sys, threading
faulthandler.register(signal.SIGUSR1, all_threads=True)
import torch
import overspill
from tests.models import TinyLM, adamw, batch


folder, update, device, caught = sys.argv[1:]
more = {"device_memory": "2MiB"} if device != "cpu" else {}
torch.manual_seed(0)
model = TinyLM(width=64, depth=6)
optimizer = overspill.wrap(model, adamw(model), device=device, update=update, nvme=folder,
                           host_memory="4MiB", durable=False, **more)

def forever():
    step = 0
    while True:
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 3:
            print("training", flush=True)

if caught == "no":
    forever()
try:
    forever()
except KeyboardInterrupt:
    pass
optimizer.close()
names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
assert not names, names
assert os.listdir(folder) == [], os.listdir(folder)
print("clean", flush=True)
"""


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Background jobs of a shell ignore them, and so would the processes that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(
    folder: Path, update: str, device: str, caught: bool, after_s: float
) -> tuple[int, str, str]:
    """Runs the child, interrupts it ``after_s`` after its third step; (status, output, errors)."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), update, device, "yes" if caught else "no"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "training\n", child.communicate()[1]
        time.sleep(after_s)
        child.send_signal(signal.SIGINT)
        try:
            out, err = child.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            child.kill()
            raise AssertionError(f"it hangs after {after_s} s:\n{child.communicate()[1]}") from None
    finally:
        child.kill()
    return child.returncode, out, err


@pytest.mark.parametrize("device", [CPU, SIM])
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_an_interrupt_that_is_caught(update: str, device: str, tmp_path: Path) -> None:
    after_s = random.Random(update + device).uniform(0, 0.05)
    status, out, err = interrupted(tmp_path, update, device, True, after_s)
    assert (status, out) == (0, "clean\n"), err
    assert "Traceback" not in err, err


def test_an_interrupt_that_is_not_caught(tmp_path: Path) -> None:
    status, _, err = interrupted(tmp_path, "next_forward", CPU, False, 0.01)
    assert status in (-signal.SIGINT, 130), err
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt"), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", [CPU, SIM])
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_many_interrupts(update: str, device: str, tmp_path: Path) -> None:
    rng = random.Random(update + device)
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        after_s = rng.uniform(0, 0.2)
        status, out, err = interrupted(folder, update, device, True, after_s)
        assert (status, out) == (0, "clean\n"), (after_s, err)


@pytest.mark.parametrize("activations", ["keep", "auto", "host"])
def test_no_python_code_runs_where_graphs_end(
    activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt that comes where Python collects an object is printed, and lost."""
    monkeypatch.setattr("overspill.activations.offloader.LEAST_BYTES", 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    options: dict[str, Any] = {
        "device": SIM, "device_memory": "90KiB", "host_memory": "2MiB", "nvme": tmp_path,
        "durable": False, "activations": activations,
    }  # fmt: skip
    called: list[str] = []
    with overspill.wrap(model, torch.optim.SGD(model.parameters()), **options):
        loss = model(torch.ones(32, 64, device=DEVICE)).sum()
        sys.setprofile(lambda frame, event, _: called.append(f"{event} {frame.f_code.co_name}"))
        try:
            del loss
        finally:
            sys.setprofile(None)
    assert [each for each in called if each.startswith("call ")] == []
