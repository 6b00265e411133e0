"""Remedies of what the disk engine and the optimizers say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overspill
from overspill.io_engine import IoEngine, backend
from overspill.io_engine.committed import own_store
from overspill.io_engine.errors import IoError, refused
from overspill.io_engine.ranges import FilePart, FileRanges, RangeReader
from overspill.io_engine.store import STORE_NAME
from overspill.optim import ElementwiseRule, kernels, register, registry
from overspill.optim.norm import sum_of_squares
from tests.devices import CPU, about_files
from tests.patience import WAIT_S
from tests.remedies.table import adamw, net, plain_run, same, says, step, trains, tries, wrapped

pytestmark = about_files
MIB = 1 << 20


def run(script: str) -> None:
    """Run a program that must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- the disk engine -------------------------------------------------------------------------------


@tries("io_engine/backend.py", "); use 'threads' or 'auto'")
def test_no_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.NATIVE is None:
        pytest.skip("needs the native extension")
    with monkeypatch.context() as patch:
        patch.setattr(backend.NATIVE, "uring_refusal", lambda: "Operation not permitted")
        with says("use 'threads' or 'auto'"):
            backend.choose("uring")
        assert [backend.choose(wish)[0] for wish in ("threads", "auto")] == ["threads"] * 2


@tries("io_engine/buffers.py", "; ask for less, or raise the address space limit (ulimit -v)",
       "; lower host_memory, or raise the memory limit of this process's group")  # fmt: skip
def test_memory_limits() -> None:
    run("""
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
            assert "ask for less, or raise the address space limit" in str(error), error
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


@tries("io_engine/ownership.py", "; choose another directory, or")
@tries("io_engine/committed.py", "resume; wrap the model to begin anew")
def test_stores_of_others(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    model = net()
    with wrapped(model, nvme=one) as optimizer:
        step(model, optimizer)
        with says("choose another directory, or close its store first"), IoEngine(one, MIB):
            pass
        with IoEngine(two, MIB):
            pass
    begun = tmp_path / "begun"
    begun.mkdir()
    run(f"""
        import os
        from tests.remedies.table import net, wrapped
        optimizer = wrapped(net(), nvme={str(begun)!r})
        os._exit(0)
    """)
    model = net()
    with says("was never committed, so there is nothing to resume; wrap the model to begin anew"):
        overspill.resume(model, begun, adamw(model), device=CPU)
    with wrapped(model, nvme=begun) as optimizer:
        step(model, optimizer)


@tries("io_engine/committed.py", ": another process has made a new store here; try again")
def test_a_store_that_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.io_engine import committed

    one, two = tmp_path / "one", tmp_path / "two"
    for each in (one, two):
        each.mkdir()
        model = net()
        with wrapped(model, nvme=each) as optimizer:
            step(model, optimizer)
    find, found = committed.find_store, []

    def replaced(paths: Any) -> Any:
        found.append(paths)
        return find(two if len(found) == 2 else paths)

    monkeypatch.setattr(committed, "find_store", replaced)
    with says("another process has made a new store here; try again"):
        own_store(one)
    own_store(one).locks.release()


@tries("io_engine/contents.py", "); write it again")
@tries("io_engine/extent_table.py", "has transfers on their way; wait for them first")
def test_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.io_engine.contents import Fill

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
            with says("has transfers on their way; wait for them first"):
                engine.free(extent)
        engine.free(extent)


@tries("io_engine/ranges.py", "bytes; it was cut while in use, or was never whole: get it again")
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
    with says("it was cut while in use, or was never whole: get it again"):
        read()
    shutil.copy(whole, file)
    assert read() == whole.read_bytes()[61440:]


@tries("io_engine/reading.py", "has; restore the store from a copy, or start from an")
def test_a_store_whose_data_changed(tmp_path: Path) -> None:
    store, copy, out = (tmp_path / name for name in ("store", "copy", "out"))
    store.mkdir()
    model = net()
    with wrapped(model, nvme=store) as optimizer:
        step(model, optimizer)
        optimizer.commit()
        optimizer.save(out)
    shutil.copytree(store, copy)
    data = bytearray((store / STORE_NAME).read_bytes())
    data[:] = bytes(each ^ 255 for each in data)
    (store / STORE_NAME).write_bytes(data)
    from overspill.durable.export import export_store

    with says("restore the store from a copy, or start from an export"):
        export_store(store, tmp_path / "no")
    expected = plain_run(1)
    again = net(seed=1)
    optimizer, _ = overspill.resume(again, copy, adamw(again), device=CPU)
    same(again, expected)
    optimizer.close()
    again = net(seed=1)
    with wrapped(again, weights=out):
        same(again, expected)


# -- optimizers ------------------------------------------------------------------------------------


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


@tries("optim/kernels.py", "; unset it to use the best")
def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.NATIVE is None:
        pytest.skip("needs the native extension")
    monkeypatch.setenv("OVERSPILL_ISA", "avx1024")
    with says("unset it to use the best"):
        kernels._load_native()
    monkeypatch.delenv("OVERSPILL_ISA")
    assert kernels._load_native() is not None


@tries("optim/optimizer.py", "; for a model on a device use overspill.wrap")
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
