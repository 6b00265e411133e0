"""Remedies of what the I/O engine and the update rules say, each used alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.io_engine import IoEngine, allocate_host, settings
from overspill.io_engine.atomic_files import make_folder, replacing, write_bytes
from tests.devices import about_files
from tests.remedies.table import (
    WIDTH,
    adamw,
    logged,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip

NBYTES = 8192


def engine(folder: Path, **options: Any) -> IoEngine:
    return IoEngine(folder, 2**20, **{"backend": "threads", **options})


def filled(value: int = 7) -> Any:
    buffer = allocate_host(NBYTES)
    buffer.array[:] = value
    return buffer


@about_files
@tries("io_engine/contents.py", "so there is nothing to read; write it first")
@tries("io_engine/extent_table.py", "free extents, or open it with a larger capacity")
@tries("io_engine/transfer.py", "pass a slice of that length",
       "take it from engine.buffer() or allocate_host()")  # fmt: skip
@tries("io_engine/dispatch.py", "the I/O engine is closed; open a new one")
@tries("io_engine/engine.py", "the I/O engine is closed; open a new one",
       "release leases, or raise buffer_bytes")  # fmt: skip
def test_the_engine(tmp_path: Path) -> None:
    with engine(tmp_path) as io:
        extent, source, target = io.allocate(NBYTES), filled(), allocate_host(NBYTES)
        with says("write it first"):
            io.read(extent, target).wait()
        io.write(extent, source).wait()
        io.read(extent, target).wait()
        assert (target.array == 7).all()
        larger = allocate_host(4 * NBYTES)
        with says("pass a slice of that length"):
            io.read(extent, larger.array)
        io.read(extent, larger.array[:NBYTES]).wait()
        with says("take it from engine.buffer() or allocate_host()"):
            io.read(extent, larger.array[1 : NBYTES + 1])
        with io.buffer(NBYTES) as lease:
            io.read(extent, lease).wait()
        with says("free extents, or open it with a larger capacity"):
            io.allocate(2**21)
        io.free(extent)
    with says("the I/O engine is closed; open a new one"):
        io.allocate(NBYTES)
    with IoEngine(tmp_path, 2**22, backend="threads") as io:
        extent = io.allocate(2**21)
        io.free(extent)
    with engine(tmp_path, buffer_bytes=2**21) as io:
        first = io.buffer(2**21)
        with says("release leases, or raise buffer_bytes"):
            io.buffer(2**21)
        first.release()
        io.buffer(2**21).release()
    with engine(tmp_path, buffer_bytes=2**22) as io:
        leases = [io.buffer(2**21) for _ in range(2)]
        for lease in leases:
            lease.release()


@about_files
@tries("io_engine/atomic_files.py", "is a folder; name a file in it",
       "is not a plain file; name another one", "does not exist; create it",
       "or name another file", "is not a folder; name another one, or remove the file")  # fmt: skip
def test_files_that_are_written(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    with says("is a folder; name a file in it"):
        write_bytes(folder, b"x")
    write_bytes(folder / "file", b"x")
    os.mkfifo(pipe)
    with says("is not a plain file; name another one"), replacing(pipe):
        pass
    with replacing(tmp_path / "another") as draft:
        draft.write_bytes(b"x")
    missing = tmp_path / "missing"
    with says("does not exist; create it, or name another file"):
        write_bytes(missing / "file", b"x")
    missing.mkdir()
    write_bytes(missing / "file", b"x")
    with says("is not a folder, or name another file"):
        write_bytes(missing / "file" / "inner", b"x")
    with says("is not a folder; name another one, or remove the file"):
        make_folder(missing / "file")
    make_folder(missing / "other")
    (missing / "file").unlink()
    make_folder(missing / "file")
    write_bytes(missing / "file" / "inner", b"x")
    assert (missing / "file" / "inner").read_bytes() == b"x"


@about_files
@tries("io_engine/settings.py", "holds no sound I/O setting; delete it")
def test_a_setting_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    path = settings.settings_path(tmp_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tuning = {"backend": "threads", "block_bytes": 3, "queue_depth": 4}
    path.write_text(json.dumps({"tuning": tuning}))
    assert settings.remembered(tmp_path) is None
    assert logged(caplog, "holds no sound I/O setting; delete it")
    path.unlink()
    assert settings.remembered(tmp_path) is None and not logged(caplog, "delete it")
    engine(tmp_path).close()


# -- update rules --------------------------------------------------------------------------------


@tries("optim/adam.py", "set it before the optimizer is wrapped")
@tries("optim/sgd.py", "set momentum before the optimizer is wrapped",
       "keep momentum above 0, or wrap with 0 in that group")  # fmt: skip
@tries("optim/averaged.py", "call overspill.ema(optimizer, decay) before wrap, and leave it")
@pytest.mark.parametrize("case", ["amsgrad", "momentum", "no momentum", "average"])
def test_hyper_parameters_that_decide_what_state_there_is(case: str) -> None:
    def make(model: nn.Module, *, changed: bool) -> Any:
        params = list(model.parameters())
        if case == "amsgrad":
            return torch.optim.AdamW(params, lr=0.01, amsgrad=changed)
        if case == "average":
            return overspill.ema(adamw(model), 0.9) if changed else adamw(model)
        with_it = case == "momentum" if changed else case != "momentum"
        return torch.optim.SGD(params, lr=0.01, momentum=0.9 if with_it else 0.0)

    words, change = {
        "amsgrad": ("set it before the optimizer is wrapped", {"amsgrad": True}),
        "momentum": ("set momentum before the optimizer is wrapped", {"momentum": 0.9}),
        "no momentum": ("keep momentum above 0, or wrap with 0 in that group", {"momentum": 0.0}),
        "average": ("call overspill.ema(optimizer, decay) before wrap", {"average_decay": 0.9}),
    }[case]
    model = net()
    with wrapped(model, make(model, changed=False)) as optimizer:
        step(model, optimizer)
        before = dict(optimizer.param_groups[0])
        optimizer.param_groups[0].update(change)
        with says(words):
            step(model, optimizer, 1)
        for name in change:
            optimizer.param_groups[0].pop(name)
        optimizer.param_groups[0].update(before)
        optimizer.zero_grad()
        trains(model, optimizer)
    model = net()
    with wrapped(model, make(model, changed=True)) as optimizer:
        trains(model, optimizer)


@tries("optim/optimizer.py", "make it contiguous first")
@tries("optim/formats.py", "is unknown; use one of {}")
def test_our_optimizers_alone() -> None:
    p = nn.Parameter(torch.ones(4, 8)[:, ::2])
    p.grad = torch.ones(4, 4)
    optimizer = overspill.optim.AdamW([p])
    with says("make it contiguous first"):
        optimizer.step()
    p = nn.Parameter(p.detach().contiguous())
    p.grad = torch.ones(4, 4)
    overspill.optim.AdamW([p]).step()
    assert not torch.equal(p, torch.ones(4, 4))
    with says("is unknown; use one of"):
        wrapped(net(), overspill.optim.AdamW([p], moments="int4"))  # type: ignore[arg-type]
    overspill.optim.AdamW([p], moments="int8")


@tries("optim/registry.py", "has no meaning outside torch's own step; leave it False")
def test_options_of_torchs_own_step() -> None:
    model = net()
    with says("leave it False"):
        wrapped(model, torch.optim.AdamW(model.parameters(), differentiable=True))
    with wrapped(model, torch.optim.AdamW(model.parameters(), lr=0.01)) as optimizer:
        trains(model, optimizer)


# -- weights that are read, and models on meta ---------------------------------------------------


@tries("offload/state/initial.py", "pass init=, a callable (module) -> None, or weights=")
def test_models_without_values(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight)

    def build() -> Any:
        with overspill.empty_init():
            return nn.Sequential(Own())

    model = build()
    with says("pass init=, a callable (module) -> None, or weights="):
        wrapped(model)

    def init(module: nn.Module) -> None:
        nn.init.ones_(module.weight)  # type: ignore[arg-type]

    with wrapped(build(), init=init) as optimizer:
        assert optimizer.step_count == 0
    file = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(4, WIDTH)}, file)
    model = build()
    with wrapped(model, weights=file) as optimizer:
        assert torch.equal(model.state_dict()["0.weight"], torch.ones(4, WIDTH))
        trains(model, optimizer)


@tries("offload/state/unmanaged.py", "build the model as it was then")
def test_a_commit_of_another_model(tmp_path: Path) -> None:
    """A buffer that the commit has is built again."""
    model = net()
    model.register_buffer("extra", torch.ones(3))
    with wrapped(model, nvme=tmp_path) as optimizer:
        step(model, optimizer)
    other = net(seed=1)
    with says("build the model as it was then"):
        overspill.resume(other, tmp_path, adamw(other), device="cpu")
    other.register_buffer("extra", torch.zeros(3))
    optimizer, _ = overspill.resume(other, tmp_path, adamw(other), device="cpu")
    with optimizer:
        assert torch.equal(other.extra, torch.ones(3))
        expected = plain_run(1)
        expected.register_buffer("extra", torch.ones(3))
        same(other, expected)


@about_files
@tries("offload/open_engines.py", "close it with overspill.unwrap({}), or choose another folder")
def test_a_store_in_use(tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    model = net()
    first = wrapped(model, nvme=place)
    second = net()
    with says(f"close it with overspill.unwrap({str(place)!r}), or choose another folder (nvme=)"):
        wrapped(second, nvme=place)
    with wrapped(second, nvme=other) as optimizer:
        trains(second, optimizer)
    step(model, first)
    overspill.unwrap(str(place))
    model = net(seed=1)
    optimizer, _ = overspill.resume(model, place, adamw(model), device="cpu")
    with optimizer:
        same(model, plain_run(1))
