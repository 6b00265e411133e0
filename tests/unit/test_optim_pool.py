"""Threads, instruction sets, the fallback, and sums over gradients."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from overspill.optim import cores, kernels, native_isa, norm, set_threads, threads
from overspill.optim.formats import split_master
from overspill.optim.norm import accumulate, sum_of_squares, sums_of_squares
from tests.optim_jobs import GRADS, ODD_SIZES, assert_same, gradients, isas, make_job
from tests.patience import WAIT_S

native = pytest.mark.skipif(kernels.NATIVE is None, reason="needs the native extension")


@pytest.fixture(autouse=True)
def keep_settings():  # type: ignore[no-untyped-def]
    count = threads()
    yield
    set_threads(count)
    if kernels.NATIVE is not None:
        kernels.NATIVE.set_isa(isas()[0])


@native
def test_isa_override(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_isa() == isas()[0]
    for isa in isas():
        monkeypatch.setenv("OVERSPILL_ISA", isa)
        kernels._load_native()
        assert native_isa() == isa
    monkeypatch.setenv("OVERSPILL_ISA", "avx1024")
    with pytest.raises(ValueError, match=r"OVERSPILL_ISA.*avx1024.*scalar"):
        kernels._load_native()


def test_missing_extension_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "overspill.optim._native", None)
    assert kernels._load_native() is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "_native" in caplog.text
    monkeypatch.setenv("OVERSPILL_NATIVE", "1")
    with pytest.raises(ImportError):
        kernels._load_native()
    monkeypatch.setenv("OVERSPILL_NATIVE", "0")
    assert kernels._load_native() is None
    assert len(caplog.records) == 1
    monkeypatch.setenv("OVERSPILL_NATIVE", "yes")
    with pytest.raises(ValueError, match="0 or 1"):
        kernels._load_native()


FALLBACK = """
import torch
from overspill.optim import AdamW, native_isa
from overspill.optim.norm import accumulate, sum_of_squares
param = torch.nn.Parameter(torch.linspace(-1, 1, 999).bfloat16())
optimizer = AdamW([param], lr=1e-2, master="split", moments="int8")
for step in range(3):
    param.grad = (torch.arange(999) % (7 + step) - 3.0).bfloat16()
    optimizer.step()
total = torch.zeros(999)
accumulate(total, param.grad)
state = optimizer.state[param]
words = [int(param.detach().view(torch.int16).long().sum()), int(state["exp_avg_sq"].sum())]
print([native_isa(), *words, state["exp_avg_scale"].tolist(), sum_of_squares(param.grad)])
"""


@native
def test_fallback_runs_and_gives_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    fallback = subprocess.run(
        [sys.executable, "-c", FALLBACK],
        env={**os.environ, "OVERSPILL_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    exec(FALLBACK, {})
    fast = ast.literal_eval(capsys.readouterr().out)
    slow = ast.literal_eval(fallback.stdout)
    assert slow[0] == "torch"
    assert fast[0] != "torch"
    assert slow[1:] == fast[1:]


def test_thread_counts() -> None:
    assert 1 <= cores.default_threads() <= len(cores.allowed_cpus())
    for count in (0, -1, 257):
        with pytest.raises(ValueError, match="1 to 256"):
            set_threads(count)


def test_some_are_left_to_whoever_hands_out_a_device_s_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    for usual, beside in ((1, 1), (2, 2), (4, 3), (8, 6), (64, 62)):
        monkeypatch.setattr(kernels, "default_threads", lambda usual=usual: usual)
        monkeypatch.setattr(kernels, "threads", lambda usual=usual: usual)
        assert (kernels.threads_beside(cpu), kernels.threads_beside(gpu)) == (usual, beside)
    monkeypatch.setattr(kernels, "threads", lambda: 16)
    assert kernels.threads_beside(gpu) == 16, "somebody has asked for so many"


@native
def test_concurrent_callers() -> None:
    """Callers that find the pool busy do their own work; results are the same."""
    set_threads(3)
    numel = 6 * 16384 + 5
    grads = list(gradients(numel, torch.bfloat16, 4))
    expected = make_job("adamw", numel, torch.bfloat16, "split")
    for step, grad in enumerate(grads, start=1):
        expected.step(grad, step)
    jobs = [make_job("adamw", numel, torch.bfloat16, "split") for _ in range(4)]

    def work(index: int) -> None:
        for step, grad in enumerate(grads, start=1):
            if index == 0:
                set_threads(1 + step)
            jobs[index].step(grad, step)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for job in jobs:
        assert_same(job, expected, "concurrent")


@native
def test_fork_gets_threads_of_its_own() -> None:
    set_threads(2)
    grad = torch.ones(5 * 16384)
    expected = sum_of_squares(grad)
    child = os.fork()
    if child == 0:
        good = threads() == 2 and all(sum_of_squares(grad) == expected for _ in range(5))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sum_of_squares(grad) == expected


@pytest.mark.parametrize("dtype", GRADS)
def test_sum_of_squares(dtype: torch.dtype) -> None:
    for numel in [0, *ODD_SIZES, 3 * 16384 + 11]:
        grad = next(gradients(numel, dtype, 1))
        exact = math.fsum(float(x) ** 2 for x in grad.double())
        plain = norm._sum_in_torch(grad)
        assert plain == pytest.approx(exact, rel=1e-14)
        for isa in isas():
            kernels.NATIVE.set_isa(isa)
            for count in (1, 2, 5):
                set_threads(count)
                assert sum_of_squares(grad) == plain
    grads = [next(gradients(numel, dtype, 1)) for numel in (5, 0, 2**22 + 11, 16384, 70_000)]
    for some in (grads, grads[:2], grads[3:]):  # by the pool, and by the caller alone
        assert sums_of_squares(some) == [norm._sum_in_torch(grad) for grad in some]
    with pytest.raises(ValueError, match="one dtype"):
        sums_of_squares(
            [grad, grad.to(torch.bfloat16 if dtype is torch.float32 else torch.float32)]
        )
    for bad in (math.inf, math.nan):
        grad = torch.ones(20000, dtype=dtype)
        grad[777] = bad
        assert not math.isfinite(sum_of_squares(grad))
        grad[778] = -math.inf
        assert not math.isfinite(sum_of_squares(grad))


def test_split_master() -> None:
    raw = torch.randint(
        -(2**31), 2**31, (3 * 16384 + 77,), generator=torch.Generator().manual_seed(0)
    )
    value = raw.to(torch.int32).view(torch.float32)
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0, 3.4028235e38, 1e-45])
    value[: len(special)] = special
    for numel in (0, 1, 31, value.numel()):
        expected = [half.view(torch.int16) for half in split_master(value[:numel])]
        for isa in isas():
            kernels.NATIVE.set_isa(isa)
            for count in (1, 2, 5):
                set_threads(count)
                upper = torch.full((numel,), 7.0, dtype=torch.bfloat16)
                lower = torch.full((numel,), 7, dtype=torch.int16)
                kernels.write_split_master(value[:numel], upper, lower)
                assert torch.equal(upper.view(torch.int16), expected[0])
                assert torch.equal(lower, expected[1])
    with pytest.raises(ValueError, match="upper must have 8 elements"):
        kernels.write_split_master(value[:8], upper, lower[:8])


@pytest.mark.parametrize("dtype", GRADS)
def test_accumulate(dtype: torch.dtype) -> None:
    for numel in [0, *ODD_SIZES, 16384 + 5]:
        total = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        grad = next(gradients(numel, dtype, 1))
        expected = total + grad.float()
        for isa in isas() or ["torch"]:
            if isa != "torch":
                kernels.NATIVE.set_isa(isa)
            mine = total.clone()
            accumulate(mine, grad)
            assert torch.equal(mine, expected)


def test_wrong_tensors_are_refused() -> None:
    job = make_job("adamw", 32, torch.bfloat16, "split", "int8")
    grad = torch.zeros(32)
    scalars = job.scalars(1)

    def update(grad: torch.Tensor, position: int = 0, **changed: torch.Tensor) -> None:
        weight = changed.pop("weight", job.weight)
        job.rule.update(grad, weight, {**job.state, **changed}, scalars, position)

    update(grad)
    with pytest.raises(ValueError, match="32 elements, but has 31"):
        update(grad[:31])
    with pytest.raises(ValueError, match="flat and contiguous"):
        update(torch.zeros(64)[::2])
    with pytest.raises(ValueError, match="float64"):
        update(grad.double())
    with pytest.raises(ValueError, match="int16"):
        update(grad, master_lo=torch.zeros(32, dtype=torch.int32))
    with pytest.raises(ValueError, match="moments share one dtype"):
        update(grad, exp_avg=torch.zeros(32))
    with pytest.raises(ValueError, match="scale must have 1 elements"):
        update(grad, exp_avg_scale=torch.zeros(2))
    with pytest.raises(ValueError, match="multiple of 256"):
        update(grad, position=32)
    with pytest.raises(KeyError):
        job.rule.update(grad, job.weight, {}, scalars)
    with pytest.raises(ValueError, match="float32"):
        accumulate(torch.zeros(3).bfloat16(), torch.zeros(3))
    with pytest.raises(ValueError, match="int64"):
        sum_of_squares(torch.zeros(3, dtype=torch.int64))
