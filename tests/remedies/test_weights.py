"""Remedies of what is said about weights: compiled, on meta, packed, and read in place."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import overspill
from overspill.io_engine import store_file
from tests.devices import CPU, SIM, about_cpu, about_sim, normal
from tests.parity.test_in_place import file_of
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

TIGHT = {"device": SIM, "device_memory": "12KiB", "host_memory": "4MiB"}


def half_frozen(seed: int = 0) -> nn.Sequential:
    model = net(seed=seed)
    model[:3].requires_grad_(requires_grad=False)
    return model


@about_sim
@tries(
    "offload/private/compile_private.py", "leave fullgraph=True out, or give it to single blocks"
)
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
@tries("io_engine/file_ranges.py", "put the file back as it was, or wrap the model")
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
@tries("io_engine/store_file.py", "free some, choose another directory, or lower nvme_memory",
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
        patch.setattr(store_file, "os", FilledMeanwhile())
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


@tries("offload/planning/sources.py",
       "bytes; put it back, or say with weights= (--weights) which folder has",
       "same; restore the file with its time (cp -p), or wrap")  # fmt: skip
def test_files_that_a_store_reads(tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    store.mkdir()
    away.mkdir()
    model = half_frozen()
    file = Path(file_of(model, tmp_path))
    with wrapped(model, nvme=store, weights=file, ignore_weights=["a"]) as optimizer:
        step(model, optimizer)

    def resumed(**options: Any) -> None:
        again = half_frozen(1)
        overspill.resume(again, store, adamw(again), device=CPU, **options)[0].close()

    shutil.copy2(file, away / file.name)
    file.unlink()
    with says("put it back, or say with weights= (--weights) which folder has the same files now"):
        resumed()
    resumed(weights=away / file.name)
    shutil.copy2(away / file.name, file)
    resumed()
    other = tmp_path / "other"
    other.mkdir()
    model = half_frozen()
    with wrapped(model, nvme=other, weights=file, ignore_weights=["a"], checksum=True) as optimizer:
        optimizer.commit()  # before anything was read
    os.utime(file, ns=(1, 1))
    again = half_frozen(1)
    with says("restore the file with its time (cp -p), or wrap the model again"):
        overspill.resume(again, other, adamw(again), device=CPU)
    shutil.copy2(away / file.name, file)
    overspill.resume(again, other, adamw(again), device=CPU)[0].close()


@about_cpu
@tries(
    "offload/planning/packed_pages.py", "); leave frozen= out, and such weights move as they are"
)
def test_weights_that_are_quantised_already() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.ones(64, 64).to(torch.float8_e4m3fn)
            self.weight = nn.Parameter(codes, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.to(x.dtype)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Narrow(), nn.Linear(64, 4))

    with says("leave frozen= out, and such weights move as they are"):
        wrapped(made(), frozen="int8")
    model = made()
    with wrapped(model) as optimizer:
        model(normal(0, 4, 64)).sum().backward()
        optimizer.step()


@tries("offload/open_engines.py", "To close it, call close() on what wrap returned")
def test_an_engine_that_is_open(caplog: pytest.LogCaptureFixture) -> None:
    model, other = net(), net(seed=1)
    optimizer = wrapped(model)
    second = wrapped(other)
    assert logged(caplog, "To close it, call close() on what wrap returned")
    second.close()
    optimizer.close()
    again = net()
    with wrapped(again):
        assert not logged(caplog, "To close it")


@about_cpu
@tries("offload/state/adapters.py", "weights; load the base before get_peft_model",
       "values: load the base before the adapter, or give no weights= and let",
       "meta, and get new values; to go on with trained ones, load them after")  # fmt: skip
def test_adapters_on_meta(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = hf.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")

    def made(*, meta: bool, **options: Any) -> Any:
        with overspill.empty_init() if meta else contextlib.nullcontext():
            model = hf.LlamaForCausalLM(config)
            adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, **options)
            if not meta:
                model.load_state_dict(base.state_dict())
            return peft.get_peft_model(model, adapters)

    options: dict[str, Any] = {"device": CPU, "rates": overspill.Rates()}
    model = made(meta=True, init_lora_weights="pissa_niter_4")
    with says("load the base before get_peft_model"):
        overspill.wrap(model, adamw(model), weights=tmp_path / "base", **options)
    model = made(meta=False, init_lora_weights="pissa_niter_4")
    overspill.wrap(model, adamw(model), **options).close()
    model = made(meta=True)
    with says("load the base before the adapter, or give no weights= and let peft load both"):
        overspill.wrap(model, weights=tmp_path / "base", **options)
    model = made(meta=False)
    overspill.wrap(model, **options).close()
    trained = {
        name: value + 1 for name, value in peft.get_peft_model_state_dict(made(meta=False)).items()
    }
    model = made(meta=True)
    caplog.set_level("INFO", "overspill")
    with overspill.wrap(model, adamw(model), weights=tmp_path / "base", **options):
        assert "load them after wrap (peft.set_peft_model_state_dict)" in caplog.text
        peft.set_peft_model_state_dict(model, trained)
        found = peft.get_peft_model_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in trained.items())


@about_cpu
@tries("offload/state/unmanaged.py", "build the model inside overspill.empty_init(), where buffers")
def test_buffers_on_meta(tmp_path: Path) -> None:
    class Rotating(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH))
            self.register_buffer("angles", torch.arange(3.0), persistent=False)

    made = Rotating()
    file = tmp_path / "weights.safetensors"
    save_file(made.state_dict(), file)
    with torch.device("meta"):
        model = Rotating()
    with says("build the model inside overspill.empty_init(), where buffers have memory"):
        wrapped(model, weights=file)
    with overspill.empty_init():
        model = Rotating()
    with wrapped(model, weights=file):
        assert model.angles.tolist() == [0.0, 1.0, 2.0]
        same(model, made)


@tries(
    "offload/quantised/format_table.py",
    "(quantization_config in config.json), which cannot be read; use a folder with bf16, fp16",
)
@tries("offload/state/importing.py", "no weight of the model is quantised with them: use a folder")
@tries("offload/state/weight_files.py", "no scales for them that are known; use a folder with bf16")
@pytest.mark.parametrize("case", ["config", "scales", "codes"])
def test_quantised_weights(case: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    weights = {name: value.contiguous() for name, value in net(seed=3).cpu().state_dict().items()}
    for folder in (good, bad):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    if case == "config":
        (bad / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "x"}}))
    elif case == "scales":
        more = {"0.0.weight_scale": torch.ones(WIDTH, 1)}
        save_file({**weights, **more}, bad / "model.safetensors")
    else:
        coded = {"0.0.weight": (9 * weights["0.0.weight"]).to(torch.int8)}
        save_file({**weights, **coded}, bad / "model.safetensors")
    model = net()
    with says("use a folder with bf16, fp16 or fp32 weights"):
        wrapped(model, weights=bad)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        typed = {name: value.to(dtype) for name, value in weights.items()}
        save_file(typed, good / "model.safetensors")
        model = net()
        with wrapped(model, weights=good) as optimizer:
            for name, value in model.state_dict().items():
                assert torch.equal(value.cpu(), typed[name].float()), name
            trains(model, optimizer)


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


@tries("offload/activations/recompute.py", "pass activations='host' if it must not")
def test_a_unit_that_changes_itself_late(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count, self.late = nn.Linear(WIDTH, WIDTH), 0, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += self.late
            return torch.tanh(self.linear(x))

    for activations, warns in (("recompute", True), ("host", False)):
        model = nn.Sequential(*[Counts() for _ in range(3)])
        with wrapped(model, activations=activations) as optimizer:
            for number in range(3):
                step(model, optimizer, number)
            for each in model:
                each.late = True
            step(model, optimizer, 3)
            assert logged(caplog, "pass activations='host' if it must not") is warns
            if not warns:
                assert [each.count for each in model] == [1, 1, 1]
