"""Forks beside a live engine: DataLoader workers and plain children leave it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, DEVICE, SIM, about_cpu, about_forks, plainly
from tests.models import TinyLM, adamw, batch, weights
from tests.patience import WAIT_S

Batch = tuple[torch.Tensor, torch.Tensor]


class Batches(Dataset[Batch]):
    """Batches by number; workers make them in processes of their own."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Batch:
        if number >= len(self):
            raise IndexError(number)
        return batch(number, device=torch.device("cpu"))


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Batch]) -> None:
    for tokens, targets in data:
        model(tokens.to(DEVICE), targets.to(DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(seed: int, epochs: int = 1) -> dict[str, torch.Tensor]:
    """Weights of a model trained by the same optimizer in memory."""
    torch.manual_seed(seed)
    model = TinyLM()
    optimizer = plainly(overspill.optim.AdamW, adamw(model).param_groups)
    for _ in range(epochs):
        fit(model, optimizer, iter(Batches()))
    return weights(model)


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_data_loader_workers_forked_while_updates_run(update: str, tmp_path: Path) -> None:
    expected = trained(0, epochs=2)
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, host_memory="2MiB", update=update, durable=False
    ) as optimizer:
        for _ in range(2):  # the second epoch forks workers while the last step's updates run
            fit(model, optimizer, iter(DataLoader(Batches(), batch_size=None, num_workers=2)))
        got = weights(model)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert list(tmp_path.iterdir()) == []


def child(work: object) -> int:
    """Runs ``work`` in a forked child; its status: 0 when it raised nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert callable(work)
            work()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@about_forks
def test_a_child_may_not_use_the_engine_and_harms_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = overspill.wrap(
        model, adamw(model), nvme=tmp_path, host_memory="2MiB", durable=False
    )
    fit(model, optimizer, iter(Batches()))

    def use() -> None:
        for attempt in (lambda: model(*batch(0)), optimizer.step, model.state_dict):
            with pytest.raises(OffloadError, match="fork"):
                attempt()

    assert child(use) == 0
    assert child(optimizer.close) == 0
    assert child(lambda: None) == 0
    fit(model, optimizer, iter(Batches()))
    assert optimizer.step_count == 12
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


MEMORY = """
import os, sys, time
import torch, overspill
import tests.devices
from torch import nn
place, folder = sys.argv[1:]
more = {"device_memory": "128MiB"} if place != "cpu" else {}
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])
optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=place,
                           host_memory="256MiB", nvme=folder, durable=False, **more)
x = torch.randn(4, 1024)

def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def pss(pids):
    lines = (line for pid in pids for line in open(f"/proc/{pid}/smaps_rollup"))
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

step()
before = pss([os.getpid()])
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    children.append(pid)
try:
    for _ in range(3):
        step()
    print(pss([os.getpid(), *children]) - before)
finally:
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
"""


@about_cpu
@pytest.mark.parametrize("place", [CPU, SIM])
def test_children_cost_no_memory_of_the_engine(place: str, tmp_path: Path) -> None:
    """What the parent writes while they live is not kept twice: 256 MiB would be."""
    # torch's gradients go back to the system when they are freed: no part of the figure.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, place, str(tmp_path)], capture_output=True, text=True,
        timeout=WAIT_S, check=False, cwd=Path(__file__).parents[2], env={**os.environ, **malloc},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 64, "MiB"


def test_weights_that_show_are_not_a_childs() -> None:
    """Between forward and step they lie in memory that a child does not have: reading them there
    is an error, and the end of no process."""
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device=CPU, host_memory="64MiB") as optimizer:
        loss = model(*batch(0))

        def look() -> None:
            for read in (model.head.weight.sum, lambda: model.head.weight.data, model.state_dict):
                with pytest.raises(OffloadError, match="fork"):
                    read()
            assert model.head.weight.shape == (500, 64)
            assert "fork" in repr(model.head.weight)

        assert child(look) == 0
        loss.backward()
        optimizer.step()
        assert optimizer.step_count == 1


def test_two_engines_side_by_side(tmp_path: Path) -> None:
    alone = [trained(0), trained(1)]
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(TinyLM())
    wrapped = [
        overspill.wrap(model, adamw(model), nvme=tmp_path / str(n), host_memory="2MiB")
        for n, model in enumerate(models)
        if not (tmp_path / str(n)).mkdir()
    ]
    for tokens, targets in Batches():
        losses = [model(tokens.to(DEVICE), targets.to(DEVICE)) for model in models]
        for loss, optimizer in zip(losses, wrapped, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, optimizer, expected in zip(models, wrapped, alone, strict=True):
        got = weights(model)
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        optimizer.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill")]


@about_forks
@pytest.mark.parametrize("held", ["a lease", "an engine", "an engine that is closed"])
def test_a_child_that_drops_what_it_inherited_keeps_its_own_memory(
    held: str, tmp_path: Path
) -> None:
    """A child does not have transfer memory: its own tensors may lie at the same addresses."""
    script = textwrap.dedent("""
        import gc, os, sys
        import torch
        import overspill
        from torch import nn
        from overspill.io_engine import allocate_host

        torch.set_num_threads(1)
        if sys.argv[1] == "a lease":
            box = [allocate_host(8 << 20)]
        else:
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
            made = overspill.wrap(
                model, torch.optim.AdamW(model.parameters()), device="sim",
                device_memory="2MiB", host_memory="16MiB", rates=overspill.Rates(),
            )
            model(torch.ones(4, 256)).sum().backward()
            made.step()
            if sys.argv[1] != "an engine":
                made.close()
            box = [model, made]
            del model, made
        pid = os.fork()
        if pid == 0:
            own = [torch.ones(1 << 20) for _ in range(8)]
            box.clear()
            gc.collect()
            os._exit(sum(each.sum().item() for each in own) != 8 << 20)
        assert os.waitpid(pid, 0)[1] == 0
    """)
    subprocess.run([sys.executable, "-c", script, held], check=True, timeout=WAIT_S)
