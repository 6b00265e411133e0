"""Remedies of what the I/O engine and the update rules say, each used alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overspill
from overspill.io_engine import IoEngine, allocate_host, backend, settings
from overspill.io_engine.atomic_files import make_folder, replacing, write_bytes
from overspill.io_engine.errors import IoError, refused
from overspill.io_engine.file_ranges import FilePart, FileRanges, RangeReader
from overspill.optim import ElementwiseRule, kernels, register, registry
from overspill.optim.norm import sum_of_squares
from tests.devices import about_files
from tests.remedies.table import (
    adamw,
    logged,
    net,
    run_script,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip

pytestmark = about_files

NBYTES = 8192
MIB = 1 << 20


def engine(folder: Path, **options: Any) -> IoEngine:
    return IoEngine(folder, 2**20, **{"backend": "threads", **options})


def filled(value: int = 7) -> Any:
    buffer = allocate_host(NBYTES)
    buffer.array[:] = value
    return buffer


class Noisy(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "maximize": False})


class NoisyRule(ElementwiseRule):
    def __init__(self, *, draws: bool) -> None:
        def update(g: Any, w: Any, m: Any, c: Any) -> None:
            w.sub_(g * c[1])
            if draws:
                w.add_(torch.randn_like(w))

        super().__init__("noisy", ("mean",), update)

    def coefficients(self, group: Any, step: int, grad_scale: float) -> tuple[float, ...]:
        return grad_scale, group["lr"]


@about_files
@tries("io_engine/extent_table.py", "so there is nothing to read; write it first")
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
       "is not a regular file; name another one", "does not exist; create it",
       "or name another file", "is not a folder; name another one, or remove the file")  # fmt: skip
def test_files_that_are_written(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    with says("is a folder; name a file in it"):
        write_bytes(folder, b"x")
    write_bytes(folder / "file", b"x")
    os.mkfifo(pipe)
    with says("is not a regular file; name another one"), replacing(pipe):
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


@tries("io_engine/backend.py", "); use 'threads' or 'auto'")
def test_no_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.NATIVE is None:
        pytest.skip("needs the native extension")
    with monkeypatch.context() as patch:
        patch.setattr(backend.NATIVE, "uring_refusal", lambda: "Operation not permitted")
        with says("use 'threads' or 'auto'"):
            backend.choose("uring")
        assert [backend.choose(wish)[0] for wish in ("threads", "auto")] == ["threads"] * 2


@tries("io_engine/buffers.py", "; use a smaller budget, or raise the address space limit (ulimit",
       "; lower host_memory, or raise the memory limit of the control group")  # fmt: skip
def test_memory_limits() -> None:
    run_script("""
        import resource
        from overspill.errors import OffloadError
        from overspill.io_engine import buffers
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
        try:
            buffers.allocate_host(256 << 20, populate=False)
            raise SystemExit("it was allocated")
        except OffloadError as error:
            assert "use a smaller budget, or raise the address space limit" in str(error), error
        with buffers.allocate_host(1 << 20):  # less
            pass
        resource.setrlimit(resource.RLIMIT_AS, before)
        with buffers.allocate_host(256 << 20, populate=False):
            pass
        madvise, buffers._Mapping._populate = buffers._Mapping._populate, lambda *_: 12
        try:
            buffers.allocate_host(1 << 20)
            raise SystemExit("it was populated")
        except OffloadError as error:
            assert "lower host_memory, or raise the memory limit" in str(error), error
        buffers._Mapping._populate = madvise
        with buffers.allocate_host(1 << 20):
            pass
    """)


@tries("io_engine/errors.py", "give this user write permission, or choose another directory",
       "create the folder, or choose another one")  # fmt: skip
def test_folders(tmp_path: Path) -> None:
    """The permission is asked for by a user that is not root: see tests/durable."""
    for error in (PermissionError(13, ""), PermissionError(1, "")):
        assert "give this user write permission, or choose" in str(refused(tmp_path, "x", error))
    lost = tmp_path / "lost"
    with IoEngine(tmp_path, MIB) as engine:
        assert engine is not None
    with pytest.raises(IoError, match="create the folder, or choose another one"):
        raise refused(lost, "cannot create a store here", FileNotFoundError(2, ""))
    lost.mkdir()
    with IoEngine(lost, MIB) as engine:
        assert engine is not None


@tries("io_engine/extent_table.py", "); write it again")
@tries("io_engine/extent_table.py", "has transfers in flight; wait for them first")
def test_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.io_engine.extent_table import Fill

    with IoEngine(tmp_path, MIB) as engine:
        buffer = engine.buffer(65536)
        buffer.array[:] = 7
        extent = engine.allocate(65536)
        engine.write(extent, buffer.array).wait()
        contents = engine._extents.contents(extent)
        contents.fill, contents.broken_by = Fill.BROKEN, "Input/output error"
        with says("a write of it failed (Input/output error); write it again"):
            engine.read(extent, buffer.array).wait()
        engine.write(extent, buffer.array).wait()
        engine.read(extent, buffer.array).wait()
        with monkeypatch.context() as patch:
            patch.setattr(engine._dispatcher, "busy_with", lambda extent: True)
            with says("has transfers in flight; wait for them first"):
                engine.free(extent)
        engine.free(extent)


@tries("io_engine/file_ranges.py", "bytes, so it is incomplete or was truncated; get it again")
def test_a_file_that_was_cut(tmp_path: Path) -> None:
    file, whole = tmp_path / "file", tmp_path / "whole"
    whole.write_bytes(np.random.default_rng(0).bytes(65536))
    shutil.copy(whole, file)
    ranges = FileRanges(0, 4096, (FilePart(0, 61440, 4096, 0),))

    def read() -> bytes:
        reader = RangeReader([file])
        data = np.zeros(4096, np.uint8)
        try:
            reader.read(ranges, data).wait()
        finally:
            reader.close()
        return data.tobytes()

    os.truncate(file, 62000)
    with says("so it is incomplete or was truncated; get it again"):
        read()
    shutil.copy(whole, file)
    assert read() == whole.read_bytes()[61440:]


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


@tries("optim/whole.py", "make it contiguous first")
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


@tries("optim/registry.py", "outside of CUDA graphs and autograd; set it to False")
def test_options_of_torchs_own_step() -> None:
    model = net()
    with says("set it to False"):
        wrapped(model, torch.optim.AdamW(model.parameters(), differentiable=True))
    with wrapped(model, torch.optim.AdamW(model.parameters(), lr=0.01)) as optimizer:
        trains(model, optimizer)


@tries("optim/kernels.py", "; unset it to use the best")
def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.NATIVE is None:
        pytest.skip("needs the native extension")
    monkeypatch.setenv("OVERSPILL_ISA", "avx1024")
    with says("unset it to use the best"):
        kernels._load_native()
    monkeypatch.delenv("OVERSPILL_ISA")
    assert kernels._load_native() is not None


@tries("optim/optimizer_base.py", "; for a model on a device use overspill.wrap")
@tries("optim/formats.py", "have no kernel; use one of")
def test_weights_without_a_kernel() -> None:
    with says("for a model on a device use overspill.wrap"):
        overspill.optim.AdamW([nn.Parameter(torch.zeros(4, device="meta"))])
    model = net()
    with wrapped(model) as optimizer:
        step(model, optimizer)
    wide = net().double()
    with says("must be one of"):
        overspill.optim.AdamW(wide.parameters())


@tries("optim/norm.py", "has no kernel; use one of")
@tries("optim/kernels.py", "has no kernel; use one of")
def test_gradients_without_a_kernel() -> None:
    weight, wide = torch.ones(4), torch.ones(4, dtype=torch.float64)
    with says("has no kernel; use one of"):
        kernels.check_job(wide, weight, {}, (), 0)
    kernels.check_job(wide.float(), weight, {}, (), 0)
    with says("has no kernel; use one of"):
        sum_of_squares(torch.ones(4, dtype=torch.float64))
    assert sum_of_squares(torch.ones(4)) == 4.0


@tries("optim/registry.py", "has a sign; name yours differently")
@tries("optim/elementwise.py", "numbers, or keep memory of its own?); overspill could not resume")
def test_rules_of_others() -> None:
    with says("has a sign; name yours differently"):
        register(Noisy, lambda group: NoisyRule(draws=False), unsigned=("exp_avg",))
    with says("gives other values when it is run again on the same ones (does it draw random"):
        register(Noisy, lambda group: NoisyRule(draws=True))
    try:
        register(Noisy, lambda group: NoisyRule(draws=False))
        model = net()
        with wrapped(model, Noisy(model.parameters())) as optimizer:
            trains(model, optimizer)
    finally:
        registry.MAKERS.pop(Noisy, None)
