"""Remedies of what is said about files of weights, adapters, and tensors over weights."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import overspill
from overspill.train.job import _refuse_on_ranks, run
from tests.devices import CPU, about_cpu, normal
from tests.parity.test_in_place import file_of
from tests.remedies.table import (
    WIDTH,
    adamw,
    logged,
    net,
    same,
    says,
    step,
    tries,
    wrapped,
)
from tests.unit.test_train_job import Quiet, small


def half_frozen(seed: int = 0) -> nn.Sequential:
    model = net(seed=seed)
    model[:3].requires_grad_(requires_grad=False)
    return model


@tries("offload/planning/sources.py",
       "bytes; put it back, or say with weights= (--weights) which folder has",
       "same; put the file back with its time (cp -p), or wrap")  # fmt: skip
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
    with says("put the file back with its time (cp -p), or wrap anew"):
        overspill.resume(again, other, adamw(again), device=CPU)
    shutil.copy2(away / file.name, file)
    overspill.resume(again, other, adamw(again), device=CPU)[0].close()


@about_cpu
@tries("offload/planning/packing.py", "); leave frozen= out, and such weights move as they are")
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
       "meta, and begin anew; to go on with trained ones, load them after")  # fmt: skip
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


@tries("offload/train/job.py",
       "compare trains in the memory of one rank; run it without torchrun",
       "precision fp16 needs a loss scale that all ranks share; use bf16")  # fmt: skip
@tries("offload/train/loop.py", "; lower the learning rate (lr), clip with max_grad_norm, or train")
def test_jobs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    several, alone = Mock(several=True), Mock(several=False)
    job = small(tmp_path, compare=True)
    with says("run it without torchrun"):
        _refuse_on_ranks(job, several)
    _refuse_on_ranks(job, alone)
    with says("use bf16"):
        _refuse_on_ranks(small(tmp_path, offload={"precision": "fp16"}), several)
    _refuse_on_ranks(small(tmp_path, offload={"precision": "bf16"}), several)
    with says("lower the learning rate (lr), clip with max_grad_norm, or train in bf16 or fp32"):
        run(small(tmp_path, steps=12, lr=1e30), Quiet())
    assert run(small(tmp_path, lr=1e-3), Quiet()) is not None
