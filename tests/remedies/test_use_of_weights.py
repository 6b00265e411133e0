"""Remedies of what is said about weights that are read, compiled, or read from files in place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from overspill.io_engine import store
from tests.devices import SIM, about_cpu, about_sim, normal
from tests.remedies.table import (
    WIDTH,
    net,
    plain_run,
    says,
    trains,
    tries,
    wrapped,
)  # fmt: skip

TIGHT = {"device": SIM, "device_memory": "12KiB", "host_memory": "4MiB"}


@about_sim
@tries("offload/training/torch_private.py", "leave fullgraph=True out, or give it to single blocks")
@pytest.mark.parametrize("way", ["left out", "blocks"])
def test_compiled_models(way: str) -> None:
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with wrapped(model, **TIGHT), pytest.raises(Exception, match="leave fullgraph=True out, or"):
        compiled(normal(0, 5, WIDTH))
    torch._dynamo.reset()
    model = net()
    if way == "left out":
        run: Any = torch.compile(model, backend="aot_eager")
    else:
        run = model
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
    with wrapped(model, **TIGHT) as optimizer:
        for number in range(2):
            run(normal(number, 5, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = plain_run(2).state_dict()
        for name, value in model.state_dict().items():
            assert torch.allclose(value, expected[name], atol=1e-6), name


@tries("offload/state/unmanaged.py", "or name files that have it in weights=")
@pytest.mark.parametrize("way", ["memory", "files"])
def test_integers_on_meta(way: str, tmp_path: Path) -> None:
    def build(device: str) -> nn.Module:
        with torch.device("meta"):
            model = net()
        table = torch.arange(4, device=device)
        model.register_parameter("table", nn.Parameter(table, requires_grad=False))
        return model

    weights = {name: value.cpu().contiguous() for name, value in net().state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    save_file({**weights, "table": torch.arange(4)}, tmp_path / "all.safetensors")
    with says("or name files that have it in weights="):
        wrapped(build("meta"))
    model = build("cpu" if way == "memory" else "meta")
    file = "weights" if way == "memory" else "all"
    options: dict[str, Any] = {"weights": tmp_path / f"{file}.safetensors"}
    if way == "memory":
        options = {"init": lambda module: module.reset_parameters()}
    with wrapped(model, **options) as optimizer:
        assert torch.equal(model.state_dict()["table"].cpu(), torch.arange(4))
        trains(model, optimizer)


@about_cpu
@tries("io_engine/ranges.py", "put the file back as it was, or wrap the model")
@pytest.mark.parametrize("way", ["put back", "wrap"])
def test_files_that_change_while_they_are_read(way: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(40)], nn.Linear(512, 4))
        model[:40].requires_grad_(False)
        return model

    def forward(model: nn.Module) -> torch.Tensor:
        return model(normal(0, 5, 512))

    file, copy = tmp_path / "weights.safetensors", tmp_path / "copy"
    weights = {name: value.cpu().contiguous() for name, value in build().state_dict().items()}
    save_file(weights, file)
    shutil.copy2(file, copy)
    expected = forward(build())
    options = {"weights": file, "host_memory": "24MiB"}
    model = build()
    optimizer = wrapped(model, **options)
    assert torch.allclose(forward(model), expected, atol=1e-5)
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "new")
    file.write_bytes((tmp_path / "new").read_bytes())
    with says("put the file back as it was, or wrap the model again"):
        for _ in range(3):
            forward(model)
    optimizer.close()
    if way == "put back":
        file.write_bytes(copy.read_bytes())
        os.utime(file, ns=(copy.stat().st_atime_ns, copy.stat().st_mtime_ns))
    model = build()
    with wrapped(model, **options):
        want = weights["0.weight"] + (way == "wrap")
        assert torch.equal(model.state_dict()["0.weight"].cpu(), want)


@about_cpu
@tries("io_engine/store.py", "free some, choose another directory, or lower nvme_memory",
       "raise the limit (ulimit -f), or use more directories")  # fmt: skip
def test_disks_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    options: dict[str, Any] = {"host_memory": "80KiB", "nvme": tmp_path}

    class FilledMeanwhile:
        """The system, but that the disk has filled up since the plan was made."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def statvfs(self, path: Any) -> Any:
            found = os.statvfs(path)
            return SimpleNamespace(f_bavail=1, f_frsize=found.f_frsize, f_blocks=found.f_blocks)

    with monkeypatch.context() as patch:
        patch.setattr(store, "os", FilledMeanwhile())
        with says("free some, choose another directory, or lower nvme_memory"):
            wrapped(net(depth=6), **options)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
        with says("raise the limit (ulimit -f), or use more directories"):
            wrapped(net(depth=6), **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    model = net(depth=6)
    with wrapped(model, **options) as optimizer:
        trains(model, optimizer)
