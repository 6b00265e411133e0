"""Several engines in one process: "auto" budgets, messages that name engines, closing by folder."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import overspill
from overspill.config import OffloadConfig
from overspill.facts.tier import Tier
from overspill.holders import UNKNOWN, holder_of
from overspill.io_engine import allocate_host
from overspill.planning import budgets
from overspill.planning.budgets import free_disk_bytes, free_host_bytes, resolve_budgets
from overspill.ranks import world
from tests.devices import CPU, about_cpu, about_forks, about_sim
from tests.models import TinyLM, adamw, train

MIB, GIB = 1 << 20, 1 << 30
RATES = overspill.Rates()


def opened(path: Path | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = TinyLM()
    if path is not None:
        path.mkdir(exist_ok=True)
    given = {"device": CPU, "nvme": path, "rates": RATES, **options}
    return model, overspill.wrap(model, adamw(model), **given)


def budget(optimizer: Any, tier: Tier = Tier.HOST) -> int:
    nbytes: int = optimizer.memory[tier].budget_bytes
    return nbytes


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="overspill")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free does not change while others run."""
    monkeypatch.setattr(budgets, "free_host_bytes", lambda: 16 * GIB)
    usage = budgets.shutil.disk_usage("/")._replace(free=64 * GIB)
    monkeypatch.setattr(budgets.shutil, "disk_usage", lambda _: usage)


# -- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["auto", "90%"])
def test_two_open_engines_do_not_take_the_same_twice(
    asked: str, steady: None, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    sizes = {"host_memory": asked, "nvme_memory": asked}
    _, one = opened(tmp_path / "one", **sizes)
    assert not warnings()
    _, other = opened(tmp_path / "other", **sizes)
    with one, other:
        assert budget(one) > 13 * GIB and budget(one, Tier.NVME) > 57 * GIB
        assert 0 < budget(one) + budget(other) <= 16 * GIB + 8 * MIB
        assert 0 < budget(one, Tier.NVME) + budget(other, Tier.NVME) <= 64 * GIB + 64 * MIB
        (told,) = warnings()
        assert "for TinyLM (nvme=" in told and "of host memory and" in told and "of disk" in told


def test_without_monkeypatching_either(tmp_path: Path) -> None:
    free, disk = free_host_bytes(), free_disk_bytes([tmp_path])
    _, one = opened(tmp_path / "one")
    _, other = opened(tmp_path / "other")
    with one, other:
        assert budget(one) + budget(other) <= 1.05 * free
        assert budget(one, Tier.NVME) + budget(other, Tier.NVME) <= 1.05 * disk


def test_budgets_in_bytes_are_kept(steady: None, tmp_path: Path) -> None:
    _, one = opened(tmp_path / "one")
    _, other = opened(tmp_path / "other", host_memory="12GiB", nvme_memory="40GiB")
    with one, other:
        assert budget(other) == 12 * GIB and budget(other, Tier.NVME) == 40 * GIB


@about_cpu
@pytest.mark.parametrize(("asked", "share"), [("auto", 0.85), ("50%", 0.5)])
def test_memory_is_left_to_other_models(asked: str, share: float, steady: None) -> None:
    """``leave`` is taken out of what is free, before the margin or the share is."""
    model, optimizer = opened(host_memory=asked, leave="4GiB")
    with optimizer:
        assert budget(optimizer) == pytest.approx(12 * GIB * share, abs=1)
    model = TinyLM()
    given = {"host_memory": asked, "leave": {"host": "20GiB"}, "device": CPU, "rates": RATES}
    plan = overspill.plan(model, adamw(model), **given)
    assert not plan.fits and plan.detail.budgets is not None and plan.detail.budgets.host == 0


@about_sim
def test_device_memory_is_left_too(steady: None) -> None:
    given = {"device": "sim", "device_memory": "50%", "rates": RATES}
    for leave, device, host in (("1GiB", 0, 15), ({"device": "512MiB"}, GIB // 4, 16)):
        plan = overspill.plan(TinyLM(), leave=leave, **given)
        assert plan.detail.budgets is not None and plan.detail.budgets.device == device
        assert plan.detail.budgets.host == pytest.approx(host * GIB * 0.85, abs=1)


@pytest.mark.parametrize(
    ("options", "host", "device"),
    [
        ({"leave": "4GiB", "device": "sim"}, 12, 4),  # of each device, and once of the host
        ({"leave": {"host": "4GiB"}, "device": "sim"}, 12, 0),
        ({"leave": {"device": "4GiB"}, "device": "sim"}, 16, 4),
        ({"leave": "4GiB", "device": "sim", "device_memory": "1GiB"}, 12, 0),
        ({"leave": "4GiB", "device": "cpu"}, 12, 0),
        ({"leave": "4GiB"}, 12, 0),
    ],
)
def test_ranks_of_a_machine_leave_it_once(
    options: dict[str, Any], host: int, device: int, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "free_host_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(world.World, "of_first_here", lambda self, make: make())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    two = world.World.__new__(world.World)
    two.local_size, two.cpu_share = 2, 0.5
    shared = two.share(OffloadConfig.from_options(options))
    resolve_budgets(shared, torch.device("cpu") if "sim" in options.values() else None)
    assert shared.host_memory == pytest.approx(host * GIB * 0.85 / 2, abs=2)
    assert shared.left_bytes("device") == device * GIB


@about_sim
def test_there_is_no_device_to_leave_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="leave: there is no device here; name 'host' alone"):
        overspill.plan(TinyLM(), leave={"device": "1GiB"}, rates=RATES)
    with pytest.raises(ValueError, match="leave: host_memory is given in bytes"):
        overspill.plan(TinyLM(), leave="1GiB", host_memory="1GiB", rates=RATES)


def test_a_closed_engine_takes_nothing(
    steady: None, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    _, one = opened(tmp_path / "one")
    one.close()
    _, other = opened(tmp_path / "other")
    with other:
        assert budget(other) == budget(one) and not warnings()


def test_the_collector_runs_before_budgets_are_taken(
    steady: None, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Of an engine that nobody has any more, or whose variables were just given another one."""
    gc.disable()
    try:
        model, optimizer = opened(tmp_path / "one")
        train(model, optimizer, 1)
        first = budget(optimizer)
        del model, optimizer
        model = TinyLM()
        plan = overspill.plan(model, adamw(model), device=CPU, rates=RATES)
        assert plan.detail.budgets is not None and plan.detail.budgets.host == first
        model, optimizer = opened(tmp_path / "two")
        assert budget(optimizer) == first and not warnings()
        model, optimizer = opened(tmp_path / "three")  # the two lives until this is assigned
        assert budget(optimizer) < first / 2 and len(warnings()) == 1
        optimizer.close()
    finally:
        gc.enable()


def test_a_plan_counts_them_too(steady: None) -> None:
    model = TinyLM()
    before = overspill.plan(model, adamw(model), device=CPU, rates=RATES).detail.budgets
    _, optimizer = opened()
    with optimizer:
        beside = overspill.plan(model, adamw(model), device=CPU, rates=RATES).detail.budgets
    assert before is not None and beside is not None
    assert beside.host + budget(optimizer) <= 16 * GIB + 8 * MIB
    assert before.host == budget(optimizer)


def test_a_model_that_is_not_trained_promises_nothing(steady: None) -> None:
    """All it takes is taken at once."""
    model = TinyLM()
    with overspill.wrap(model, device=CPU, rates=RATES) as offloaded:
        first = offloaded.memory[Tier.HOST].budget_bytes
        _, optimizer = opened()
        with optimizer:
            assert first - 8 * MIB <= budget(optimizer) <= first


def test_what_was_taken_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says that it is used."""
    from overspill.activations import offloader

    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)
    model, optimizer = opened(
        tmp_path / "one", host_memory="6MiB", activations="auto", durable=False
    )
    with optimizer:
        engine = optimizer._engine
        before = engine.untaken()
        loss = model(*(torch.randint(0, 500, (4, 16)) for _ in range(2)))
        loss.backward()
        optimizer.step()
        after = engine.untaken()
        assert after.host <= before.host
        assert sum(after.disk.values()) <= sum(before.disk.values())


def test_budgets_that_are_too_large_together_are_told(
    steady: None, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    total = int(psutil.virtual_memory().total)
    _, one = opened(host_memory=2 * total // 3)
    _, other = opened(host_memory=2 * total // 3)
    with one, other:
        assert "; together this is more than the" in warnings()[-1]


def test_directories_on_one_disk_share_it(tmp_path: Path) -> None:
    both = [tmp_path / "a", tmp_path / "b"]
    for each in both:
        each.mkdir()
    assert free_disk_bytes(both) == pytest.approx(free_disk_bytes(both[:1]), rel=0.05)


def test_pages_that_memory_has() -> None:
    with allocate_host(8 * MIB, populate=False) as lease:
        assert lease.resident_bytes() == 0
        lease.array[: 3 * MIB] = 1
        assert 3 * MIB <= lease.resident_bytes() <= 4 * MIB
    assert lease.resident_bytes() == 0
    with allocate_host(8 * MIB) as lease:
        assert lease.resident_bytes() == 8 * MIB


@about_forks
def test_a_forked_child_has_none_of_its_parent_s(
    steady: None, warnings: Callable[[], list[str]]
) -> None:
    _, optimizer = opened()
    with optimizer:
        pid = os.fork()
        if pid == 0:
            try:
                model = TinyLM()
                plan = overspill.plan(model, adamw(model), device=CPU, rates=RATES)
                assert plan.detail.budgets is not None
                os._exit(0 if plan.detail.budgets.host == budget(optimizer) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- who keeps it alive -------------------------------------------------------------------------


@pytest.fixture
def shell() -> Iterator[ModuleType]:
    """A module whose variables are those of a shell."""
    module = ModuleType("a_shell")
    sys.modules["a_shell"] = module
    yield module
    del sys.modules["a_shell"]


class Trainer:
    def __init__(self, model: object) -> None:
        self.model = model


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda it: it, lambda it: [it], lambda it: {"model": it}, Trainer,
        lambda it: [Trainer((it,))], lambda it: lambda: it, lambda it: it.forward,
    ],
    ids=["itself", "list", "dict", "attribute", "nested", "closure", "method"],
)  # fmt: skip
def test_variables_are_named(shell: ModuleType, wrapped: Callable[[Any], Any]) -> None:
    model = nn.Linear(2, 2)
    shell.kept = wrapped(model)  # type: ignore[attr-defined]
    assert holder_of([model]) == "the variable 'kept' of a_shell"


def test_a_name_of_the_user_s_rather_than_a_shell_s(shell: ModuleType) -> None:
    model = nn.Linear(2, 2)
    shell._, shell.net = model, model  # type: ignore[attr-defined]
    assert holder_of([model]) == "the variable 'net' of a_shell"


def test_a_traceback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[BaseException] = []

    def cell() -> None:
        mine = nn.Linear(2, 2)
        raise ValueError(mine.in_features)

    try:
        cell()
    except ValueError as error:
        kept.append(error)
    last = kept[0].__traceback__
    assert last is not None and last.tb_next is not None
    model = last.tb_next.tb_frame.f_locals["mine"]
    monkeypatch.setattr(sys, "last_traceback", last, raising=False)
    told = holder_of([model])
    assert told.startswith("the local variable 'mine' of cell() (") and __file__ in told
    assert told.endswith("in the traceback of the last exception (sys.last_value)")
    monkeypatch.undo()
    told = holder_of([model])
    assert told.endswith(", in a frame that something keeps alive, such as a traceback")


def test_what_the_collector_does_not_see(shell: ModuleType) -> None:
    model = nn.Linear(2, 2)
    assert holder_of([model]) == UNKNOWN
    assert holder_of([]) == UNKNOWN


# -- its folder ---------------------------------------------------------------------------------

NOTEBOOK = """
import gc, logging, os, sys
import psutil, torch, overspill
from torch import nn

def rss():
    return psutil.Process().memory_info().rss >> 20

def train_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = overspill.wrap(model, optimizer, device="cpu", nvme=folder, rates=overspill.Rates())
    for _ in range(2):
        model(torch.ones(4, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError("the cell has an error")

folder = sys.argv[1]
try:
    train_model()
except RuntimeError as error:  # what a shell does with it
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
full = rss()
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
try:
    overspill.resume(model, folder)
except overspill.IoError as error:
    print(error)
assert rss() < full + 100, "another engine beside the first"
overspill.unwrap(folder)
assert rss() < full - 150, (full, rss())
optimizer, _ = overspill.resume(model, folder, device="cpu", rates=overspill.Rates())
print(optimizer.step_count)
optimizer.close()
"""


@about_sim
def test_a_notebook_whose_cell_has_failed(tmp_path: Path) -> None:
    """The traceback keeps the engine; running the cell again met "end process N": the kernel."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told, steps = done.stdout.splitlines()
    assert (
        f"in use by this process, which has an open engine for Sequential (nvme={tmp_path}" in told
    )
    assert "the local variable 'model' of train_model()" in told
    assert "in the traceback of the last exception (sys.last_value)" in told
    assert f"overspill.unwrap('{tmp_path}')" in told and "end that process" not in told
    assert steps == "2"


def test_the_remedy_of_a_store_in_use_works(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path, host_memory="64MiB")
    train(model, optimizer, 2)
    again = TinyLM()
    for call in (
        lambda: overspill.resume(again, tmp_path, device=CPU, rates=RATES),
        lambda: opened(tmp_path, host_memory="64MiB"),
    ):
        with pytest.raises(overspill.IoError, match="in use by this process") as raised:
            call()
        remedy = str(raised.value).partition("close it with ")[2].partition(", or ")[0]
        assert remedy == f"overspill.unwrap({str(tmp_path)!r})"
    exec(remedy, {"overspill": overspill})
    with pytest.raises(overspill.OffloadError, match="closed"):
        train(model, optimizer, 1)
    resumed, _ = overspill.resume(again, tmp_path, device=CPU, rates=RATES)
    with resumed:
        assert resumed.step_count == 2
        with pytest.raises(overspill.IoError, match="in use by this process"):
            overspill.resume(TinyLM(), tmp_path)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("given", ["str", "path", "relative", "link"])
def test_a_folder_closes_its_engine(
    given: str, durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    _, other = opened(tmp_path / "other", host_memory="64MiB", durable=durable)
    _, optimizer = opened(folder, host_memory="64MiB", durable=durable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    names = {"str": str(folder), "path": folder, "relative": "store", "link": tmp_path / "link"}
    assert overspill.unwrap(names[given]) is None  # type: ignore[arg-type]
    assert optimizer._engine.finished and not other._engine.finished
    with pytest.raises(overspill.OffloadError, match=f"open engines use {tmp_path / 'other'}"):
        overspill.unwrap(folder)
    other.close()
    with pytest.raises(overspill.OffloadError, match="none is open with nvme="):
        overspill.unwrap(folder)


def test_a_run_s_folder_closes_the_engine_of_a_rank(tmp_path: Path) -> None:
    _, optimizer = opened(tmp_path / "rank-00000-of-00002", host_memory="64MiB")
    overspill.unwrap(tmp_path)
    assert optimizer._engine.finished


def test_one_engine_for_inference_is_closed_as_well(tmp_path: Path) -> None:
    model = TinyLM()
    offloaded = overspill.wrap(model, device=CPU, nvme=tmp_path, rates=RATES, host_memory="64MiB")
    overspill.unwrap(tmp_path)
    assert offloaded._engine.finished


@pytest.mark.parametrize("wrong", ["", 3, b"bytes", None])
def test_what_is_neither_a_model_nor_a_folder(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        overspill.unwrap(wrong)
