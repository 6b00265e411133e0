"""Every instruction set and the torch oracle give the same bits, whatever the formats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from overspill.optim import kernels
from overspill.optim.formats import BLOCK, Master, Moments
from tests.optim_jobs import (
    COMPACT_RULES,
    GRADS,
    ODD_SIZES,
    RULES,
    WEIGHTS,
    Job,
    assert_same,
    gradients,
    isas,
    make_job,
)

pytestmark = pytest.mark.skipif(kernels.NATIVE is None, reason="needs the native extension")

SPECIAL = [
    0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.17549435e-38, 1e-30, 1.0, -1.0, 65504.0, 65520.0, 1e30,
    3.38953139e38, 3.3961775e38, 3.4028234e38, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    threads = kernels.threads()
    yield
    kernels.NATIVE.set_isa(isas()[0])
    kernels.set_threads(threads)


def run(isa: str, job: Job, grad_dtype: torch.dtype, steps: int = 3) -> Job:
    numel = job.weight.numel()
    for step, grad in enumerate(gradients(numel, grad_dtype, steps), start=1):
        if isa == "torch":
            assert job.step_in_torch(grad, step, 0.37)
        else:
            kernels.NATIVE.set_isa(isa)
            assert job.step(grad, step, 0.37)
    return job


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_all_agree_bitwise(name: str, weight: tuple[torch.dtype, Master]) -> None:
    kinds: list[Moments] = ["fp32", "bf16", "int8"] if name in COMPACT_RULES else ["fp32"]
    for moments in kinds:
        for grad_dtype in GRADS:
            for numel in ODD_SIZES:
                oracle = run("torch", make_job(name, numel, *weight, moments), grad_dtype)
                for isa in isas():
                    mine = run(isa, make_job(name, numel, *weight, moments), grad_dtype)
                    assert_same(mine, oracle, (isa, moments, grad_dtype, numel))


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("name", sorted(RULES))
def test_special_gradients(name: str, weight: tuple[torch.dtype, Master], moments: Moments) -> None:
    if moments != "fp32" and name not in COMPACT_RULES:
        pytest.skip("this rule has fp32 moments only")
    grad = torch.tensor(SPECIAL).repeat(3)
    for grad_dtype in GRADS:
        oracle = make_job(name, grad.numel(), *weight, moments)
        finite = [oracle.step_in_torch(grad.to(grad_dtype), s) for s in (1, 2)]
        for isa in isas():
            kernels.NATIVE.set_isa(isa)
            mine = make_job(name, grad.numel(), *weight, moments)
            assert [mine.step(grad.to(grad_dtype), s) for s in (1, 2)] == finite
            assert finite == [False, False]
            assert_same(mine, oracle, (isa, grad_dtype))


@pytest.mark.parametrize("value", SPECIAL)
def test_finite_is_told_of_each_value(value: float) -> None:
    for numel, place in ((1, 0), (40, 33), (BLOCK * 70, BLOCK * 69 + 3)):
        for moments in ("fp32", "bf16", "int8"):
            oracle = make_job("adamw", numel, torch.bfloat16, "split", moments)
            grad = torch.full((numel,), 1e-3)
            grad[place] = value
            expected = oracle.step_in_torch(grad, 1)
            if abs(value) < 1e18:
                assert expected
            for isa in isas():
                kernels.NATIVE.set_isa(isa)
                mine = make_job("adamw", numel, torch.bfloat16, "split", moments)
                assert mine.step(grad, 1) == expected


def test_overflow_of_the_stored_weight_is_told() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for isa in isas():
            kernels.NATIVE.set_isa(isa)
            job = make_job("sgd", 33, dtype, "fp32")
            largest = torch.finfo(dtype).max
            job.state["master"][20] = largest
            job.group = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0}
            grad = torch.zeros(33)
            assert job.step(grad, 1)
            grad[20] = -largest * 2**-8
            assert not job.step(grad, 2)
            assert job.weight[20].isinf()


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_threads_do_not_matter(moments: Moments) -> None:
    numel = 5 * 16384 + 77
    kernels.set_threads(1)
    alone = run(
        isas()[0], make_job("adamw", numel, torch.bfloat16, "split", moments), torch.bfloat16
    )
    for count in range(2, 9):
        kernels.set_threads(count)
        assert kernels.threads() == count
        many = run(
            isas()[0], make_job("adamw", numel, torch.bfloat16, "split", moments), torch.bfloat16
        )
        assert_same(many, alone, count)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_splits_do_not_matter(moments: Moments) -> None:
    numel = 3 * 16384 + 21
    whole = make_job("adamw", numel, torch.bfloat16, "split", moments)
    parts = make_job("adamw", numel, torch.bfloat16, "split", moments)
    edges = [0, 256, 1536, 1536 + 256 * 100, numel]
    if moments != "int8":
        edges[1:1] = [32, 96]
    for step, grad in enumerate(gradients(numel, torch.bfloat16, 3), start=1):
        whole.step(grad, step)
        for begin, end in itertools.pairwise(edges):
            state = {
                f.name: parts.state[f.name][begin // f.block : -(-end // f.block)]
                for f in parts.fields
            }
            parts.rule.update(
                grad[begin:end], parts.weight[begin:end], state, parts.scalars(step), begin
            )
    assert_same(parts, whole, edges)


def test_empty_buffers() -> None:
    for name in RULES:
        job = make_job(name, 0)
        assert job.step(torch.zeros(0), 1)
        assert job.step_in_torch(torch.zeros(0), 1)


def test_unaligned_buffers() -> None:
    """Nothing depends on where a buffer starts."""
    numel = 531
    aligned = run(isas()[0], make_job("adamw", numel), torch.float32)
    shifted = make_job("adamw", numel)
    for tensor_name, tensor in shifted.tensors().items():
        room = torch.zeros(numel + 1, dtype=tensor.dtype)
        room[1:] = tensor
        if tensor_name == "weight":
            shifted.weight = room[1:]
        else:
            shifted.state[tensor_name] = room[1:]
    run(isas()[0], shifted, torch.float32)
    assert_same(shifted, aligned, "offset 4")
