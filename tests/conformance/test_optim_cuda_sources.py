"""The CUDA sources: they compile, and on the host their arithmetic is the oracle's, bit for bit.

What this cannot show is how they run on a GPU: see tests/gpu.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from overspill.optim.device import AdamJob, Tile, adam_job
from overspill.optim.formats import Master, Moments
from tests.optim_jobs import WEIGHTS, assert_same, gradients, make_job

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


@pytest.mark.parametrize("source", ["adam.cu", "gather.cu"])
def test_nvcc_compiles(source: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    flags = ["-std=c++17", "-arch=sm_80", "-fmad=false", "-ptx", "-Werror=all-warnings"]
    subprocess.run(
        ["nvcc", *flags, str(SOURCES / source), "-o", str(tmp_path / "out.ptx")],
        check=True,
    )


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
            scalars = mine.scalars(step, 0.37)
            job = adam_job(grad, mine.weight, mine.state, scalars, 0)
            kind = {"fp32": 0, "bf16": 1, "int8": 2}[moments]
            assert host.run_adam(kind, ctypes.byref(job)) == (0 if finite else 1)
        assert_same(mine, oracle, (name, grad_dtype, numel))


def test_adam_tells_what_is_not_finite(host: ctypes.CDLL) -> None:
    for bad in (float("inf"), float("nan"), 3e38):
        mine = make_job("adamw", 300, torch.bfloat16, "split")
        grad = torch.full((300,), 1e-3)
        assert (
            host.run_adam(
                0, ctypes.byref(adam_job(grad, mine.weight, mine.state, mine.scalars(1), 0))
            )
            == 0
        )
        grad[299] = bad
        assert (
            host.run_adam(
                0, ctypes.byref(adam_job(grad, mine.weight, mine.state, mine.scalars(2), 0))
            )
            == 1
        )


@pytest.mark.parametrize("flat_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather(host: ctypes.CDLL, flat_dtype: torch.dtype) -> None:
    kinds = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    grads = [torch.randn(70).half(), torch.randn(500), torch.randn(33).bfloat16()]
    offsets = [0, 96, 608]
    flat = torch.full((700,), 7.0, dtype=flat_dtype)
    tiles = (Tile * 3)(
        *(
            Tile(grad.data_ptr(), offset, grad.numel(), kinds[grad.dtype])
            for grad, offset in zip(grads, offsets, strict=True)
        )
    )
    squares = torch.zeros(3, dtype=torch.float64)
    host.run_gather(
        3,
        tiles,
        ctypes.c_void_p(flat.data_ptr()),
        kinds[flat_dtype],
        ctypes.c_void_p(squares.data_ptr()),
    )
    for grad, offset, square in zip(grads, offsets, squares, strict=True):
        stored = flat[offset : offset + grad.numel()]
        assert torch.equal(stored, grad.to(flat_dtype))
        assert float(square) == pytest.approx(float(stored.double().square().sum()), rel=1e-14)
    assert (flat[70:96] == 7).all(), "gaps stay"


def test_layouts_match() -> None:
    assert ctypes.sizeof(AdamJob) == 128
    assert ctypes.sizeof(Tile) == 24
