"""The CUDA sources: they compile, and on the host their arithmetic is the oracle's, bit for bit.

What this cannot show is how they run on a GPU: see tests/gpu.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.optim import cuda_kernels, kernels
from overspill.optim.cuda_kernels import AdamJob
from overspill.optim.formats import Master, Moments
from tests.optim_jobs import WEIGHTS, Job, assert_same, gradients, make_job

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("cuda") / "host.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w"]
    where = ["-I", str(SOURCES), "-I", str(HERE)]
    subprocess.run(
        ["g++", *flags, *where, str(HERE / "cuda_on_host.cpp"), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def adam_job(job: Job, grad: torch.Tensor, step: int, grad_scale: float = 1.0) -> AdamJob:
    """The kernel's argument for one step of ``job``."""
    scalars = job.scalars(step, grad_scale)
    return cuda_kernels.adam_job(
        grad, job.weight, job.state, scalars.coefficients, scalars.noise_key, 0
    )


@pytest.mark.parametrize("source", ["adam.cu", "unpack.cu", "activations.cu"])
def test_what_is_denormal_stays(source: str, tmp_path: Path) -> None:
    """CuPy compiles with -ftz=true whatever it is told; no instruction may heed that."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    flags = ["-std=c++17", "-arch=sm_80", "-fmad=false", "-ftz=true", "-Werror=all-warnings"]
    out = tmp_path / "out.ptx"
    subprocess.run(["nvcc", *flags, "-ptx", str(SOURCES / source), "-o", str(out)], check=True)
    code = out.read_text()
    assert "mul.rn.f32" in code
    assert ".ftz" not in code


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_adam_agrees_with_the_oracle(
    host: ctypes.CDLL, weight: tuple[torch.dtype, Master], moments: Moments
) -> None:
    for name, grad_dtype, numel in (
        ("adamw", torch.bfloat16, 600),
        ("adam", torch.float16, 33),
        ("adamw", torch.float32, 257),
    ):
        oracle = make_job(name, numel, *weight, moments)
        mine = make_job(name, numel, *weight, moments)
        for step, grad in enumerate(gradients(numel, grad_dtype, 2), start=1):
            finite = oracle.step_in_torch(grad, step, 0.37)
            job = adam_job(mine, grad, step, 0.37)
            kind = {"fp32": 0, "bf16": 1, "int8": 2}[moments]
            assert host.run_adam(kind, ctypes.byref(job)) == (0 if finite else 1)
        assert_same(mine, oracle, (name, grad_dtype, numel))


def test_adam_tells_what_is_not_finite(host: ctypes.CDLL) -> None:
    for bad in (float("inf"), float("nan"), 3e38):
        mine = make_job("adamw", 300, torch.bfloat16, "split")
        grad = torch.full((300,), 1e-3)
        assert host.run_adam(0, ctypes.byref(adam_job(mine, grad, 1))) == 0
        grad[299] = bad
        assert host.run_adam(0, ctypes.byref(adam_job(mine, grad, 2))) == 1


def test_layouts_match() -> None:
    assert ctypes.sizeof(AdamJob) == 128


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_rules_use_the_kernels_on_a_gpu(
    moments: Moments, host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way but the launch, which the host stands in for."""
    launched = []

    def launch(
        source: str, kernel: str, blocks: int, arguments: tuple[Any, int], like: torch.Tensor
    ) -> None:
        assert source == "adam.cu"
        launched.append((kernel, blocks))
        job, flag = arguments
        assert (job.size, job.itemsize) == (1, ctypes.sizeof(AdamJob)), "CuPy passes it by value"
        found = host.run_adam(cuda_kernels.KERNELS.index(kernel), ctypes.c_void_p(job.ctypes.data))
        ctypes.c_int32.from_address(int(flag)).value = found

    monkeypatch.setattr(kernels, "serves", lambda kernel, _: False)
    monkeypatch.setattr(cuda_kernels, "serves", lambda kernel, _: kernel == "adam")
    monkeypatch.setattr(cuda_kernels, "launch", launch)
    oracle, mine = (make_job("adamw", 5000, torch.bfloat16, "split", moments) for _ in range(2))
    for step, grad in enumerate(gradients(5000, torch.bfloat16, 2), start=1):
        assert mine.step(grad, step, 0.37) == oracle.step_in_torch(grad, step, 0.37)
    assert_same(mine, oracle, moments)
    assert launched == [(f"adam_{moments}", 3)] * 2
    grad[77] = float("inf")
    assert not mine.step(grad, 3)
    assert make_job("lion", 33).step(torch.ones(33), 1)  # in torch: no kernel for it
    assert len(launched) == 3


def test_kernels_are_chosen_only_where_they_can_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnGpu:
        device = torch.device("cuda")

    assert not cuda_kernels.serves("adam", torch.zeros(3))
    compiled = []

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            assert '#include "' not in code
            assert "--fmad=false" in options
            self.code = code

        def compile(self) -> None:
            compiled.append(self.code)
            if len(compiled) > 1:
                raise RuntimeError("no compiler")

    for cached in (cuda_kernels._module, cuda_kernels.ready):
        cached.cache_clear()
        monkeypatch.setattr(cuda_kernels, cached.__name__, functools.cache(cached.__wrapped__))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(RawModule=Module))
    assert cuda_kernels.serves("adam", OnGpu())  # type: ignore[arg-type]
    assert cuda_kernels.serves("adam", OnGpu())  # type: ignore[arg-type]
    assert not cuda_kernels.serves("momentum", OnGpu())  # type: ignore[arg-type]
    assert len(compiled) == 1 and "adam_int8" in compiled[0]
    cuda_kernels.ready.cache_clear()
    cuda_kernels._module.cache_clear()
    for _ in range(2):
        assert not cuda_kernels.serves("adam", OnGpu())  # type: ignore[arg-type]
    assert [r.message for r in caplog.records] == [
        "kernels of adam.cu are not there, plain torch is several times slower: RuntimeError: "
        "no compiler"
    ]
