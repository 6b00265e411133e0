"""Runs over frozen weights that are read in place: resumed anywhere, they still are.

What was trained is that of the run, although the files have it too.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import overspill
from overspill.engine import Engine
from overspill.ranks.stores import export_run, find_run

from .spawned import RATES, folder_of, loss_of, net, spawn

Weights = dict[str, torch.Tensor]
OPTIONS: dict[str, Any] = {"device": "sim", "rates": RATES, "host_memory": "64MiB"}
FROZEN = ("up.weight", "down.weight", "embed.weight")
STEPS = 3


def model_of(kind: str) -> Any:
    """Without values; FSDP2 shards it, and DDP needs those of what is trained."""
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad = not name.endswith(FROZEN)
    away = [n for n, p in model.named_parameters() if kind != "ddp" or not p.requires_grad]
    for name in away:
        owner, _, own = name.rpartition(".")
        p = model.get_parameter(name)
        empty = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        setattr(model.get_submodule(owner), own, empty)
    if kind == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, away)
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for module in (*model.layers, model):
            fully_shard(module)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def tight(kind: str, size: int) -> dict[str, Any]:
    return {"device_memory": f"{80 // size + 30 if kind == 'fsdp2' else 110}KiB"}


def weights_of(model: Any) -> Weights:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {}
    for name, p in inner.named_parameters():
        value = p.full_tensor() if isinstance(p, DTensor) else p
        found[name] = value.detach().clone().cpu()
    return found


def train(model: Any, optimizer: Any, first: int) -> None:
    for number in range(first, first + STEPS):
        loss_of(model, number, 0).backward()  # every rank has the same batch
        optimizer.step()
        optimizer.zero_grad()


def begins(rank: int, size: int, kind: str, base: Path, run: Path) -> Weights:
    model = model_of(kind)
    with overspill.wrap(
        model, adamw(model), weights=base, nvme=run, **OPTIONS, **tight(kind, size)
    ) as optimizer:
        assert optimizer.plan.detail.layout.in_place  # type: ignore[union-attr]
        train(model, optimizer, 0)
        return weights_of(model)


def goes_on(
    rank: int, size: int, kind: str, run: Path, files: Path | None, into: Path | None = None
) -> Weights:
    model = model_of(kind)
    given = {"weights": files} if files is not None else {}
    optimizer, _ = overspill.resume(
        model, run, adamw(model), nvme=into, **given, **OPTIONS, **tight(kind, size)
    )
    with optimizer:
        layout = optimizer.plan.detail.layout
        assert layout.in_place, "not copied"
        streamed = [unit for unit in layout.in_place if layout.streamed[unit]]
        assert streamed
        found = weights_of(model)
        train(model, optimizer, STEPS)
    return found


def refused(
    rank: int, size: int, kind: str, run: Path, files: Path | None, why: str, into: Path
) -> None:
    """An error on all ranks, after which the model is as it was."""
    model = model_of(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = {"weights": files} if files is not None else {}
    into.mkdir(exist_ok=True)
    with pytest.raises(overspill.OffloadError, match=why):
        overspill.resume(
            model, run, adamw(model), nvme=into, **given, **OPTIONS, **tight(kind, size)
        )
    for name, p in model.named_parameters():
        assert p.is_meta == before[name].is_meta, name
        assert p.is_meta or torch.equal(p, before[name]), name


def nothing_in_place(rank: int, size: int, run: Path, into: Path) -> None:
    """``weights=`` has no meaning for a run that reads none, and would replace what was trained."""
    model = net()
    with overspill.wrap(sharded := fully_shard(model), adamw(model), nvme=run, **OPTIONS) as made:
        train(sharded, made, 0)
        trained = weights_of(model)
    for options in {"weights": run}, {}:
        model = fully_shard(net())
        told = pytest.raises(ValueError, match="resume takes the weights of the store")
        with told if options else nullcontext():
            made, _ = overspill.resume(model, run, adamw(model), nvme=into, **options, **OPTIONS)
    with made:
        assert all(torch.equal(trained[name], value) for name, value in weights_of(model).items())


def test_weights_are_for_runs_that_read_them(tmp_path: Path) -> None:
    spawn(2, nothing_in_place, folder_of(tmp_path / "run"), folder_of(tmp_path / "into"))


def save_base(folder: Path) -> Weights:
    """In several files, nested; what is trained is in one of its own. Return the weights."""
    torch.manual_seed(0)
    values = {n: t + 0.01 for n, t in net().state_dict().items() if n != "runs"}
    frozen = [name for name in values if name.endswith(FROZEN)]
    parts = {"x/one": frozen[::2], "y/two": frozen[1::2],
             "rest": [*(values.keys() - set(frozen)), "runs"]}  # fmt: skip
    index = {name: f"{file}.safetensors" for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file, names in parts.items():
        (folder / file).parent.mkdir(exist_ok=True)
        held = {n: values[n] if n in values else torch.tensor(0) for n in names}
        save_file(held, folder / f"{file}.safetensors")
    return values


def damage(file: Path, name: str) -> None:
    """Change a bit of a tensor in a safetensors file, but not the time of change."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + begin] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=times)


def alone_refused(run: Path, **options: Any) -> None:
    """After an error, the one process has its model and optimizer as before."""
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad = not name.endswith(FROZEN)
    before, optimizer = weights_of(model), adamw(model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    before, state = weights_of(model), {p: s["step"] for p, s in optimizer.state.items()}
    with pytest.raises(overspill.OffloadError):
        overspill.resume(model, run, optimizer, **{**OPTIONS, **options})
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())
    assert {p: s["step"] for p, s in optimizer.state.items()} == state


def alone_interrupted(run: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> None:
    """Once weights are read, former ones are gone, which is said; the optimizer is as before."""
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad = not name.endswith(FROZEN)
    optimizer = adamw(model)
    fails = mock.patch.object(Engine, "open", side_effect=KeyboardInterrupt)
    with fails, pytest.raises(KeyboardInterrupt):
        overspill.resume(model, run, optimizer, **{**OPTIONS, **options})
    assert "former weights could not be given back" in caplog.text and not optimizer.state
    assert goes_on(0, 1, "one", run, options["weights"])


def never_in_place(rank: int, size: int, run: Path, expected: Weights) -> None:
    """Frozen weights on meta leave the device under DDP, wherever the run had them."""
    model = model_of("ddp")
    optimizer, _ = overspill.resume(model, run, adamw(model), **OPTIONS, **tight("ddp", size))
    with optimizer:
        found = weights_of(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert any(optimizer.plan.detail.layout.streamed)


def test_weights_on_meta_come_from_the_store(tmp_path: Path) -> None:
    model, run = net(), folder_of(tmp_path / "run")
    for name, p in model.named_parameters():
        p.requires_grad = not name.endswith(FROZEN)
    with overspill.wrap(model, adamw(model), nvme=run, **OPTIONS) as optimizer:
        train(model, optimizer, 0)
        expected = weights_of(model)
    spawn(2, never_in_place, run, expected)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_files_that_were_moved(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, moved, run = (folder_of(tmp_path / name) for name in ("base", "moved", "run"))
    values = save_base(base)
    expected = spawn(2, begins, kind, base, run)[0]
    for name, value in values.items():
        assert torch.equal(expected[name], value) == name.endswith(FROZEN), name
    shutil.copytree(base, moved, copy_function=shutil.copyfile, dirs_exist_ok=True)  # no times
    shutil.rmtree(base)

    def again(name: str) -> Path:
        return Path(shutil.copytree(run, tmp_path / name))

    other = "ddp" if kind == "fsdp2" else "fsdp2"
    for name, spread, size in ("same", kind, 2), ("more", kind, 4), ("other", other, 1):
        for found in spawn(size, goes_on, spread, again(name), moved):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[n], value) for n, value in expected.items()), name
    alone = goes_on(0, 1, "one", again("alone"), moved)
    assert all(torch.equal(alone[n], value) for n, value in expected.items())
    found_run = find_run([run])
    assert found_run is not None
    with pytest.raises(overspill.OffloadError, match="is not there"):
        export_run(found_run, tmp_path / "out")
    export_run(found_run, tmp_path / "out", weights=moved)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[n], value) for n, value in expected.items())
    spawn(2, refused, kind, again("lost"), None, "is not there", tmp_path / "a")
    alone_refused(again("small"), weights=moved, host_memory="1KiB")
    alone_interrupted(again("interrupted"), caplog, weights=moved)
    file = next(f for f in sorted(moved.glob("*/*")) if "layers.1.up.weight" in load_file(f))
    damage(file, "layers.1.up.weight")
    alone_refused(again("one bad"), weights=moved)
    spawn(
        3, refused, kind, again("bad"), moved, "have changed since the store|rank", tmp_path / "b"
    )
