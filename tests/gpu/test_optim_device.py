"""The GPU kernels on a GPU: bit for bit the CPU kernels, and faster than plain torch."""

from __future__ import annotations

import pytest
import torch

from overspill.optim import cuda_kernels
from overspill.optim.formats import Master, Moments
from tests.optim_jobs import WEIGHTS, assert_same, gradients, make_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_adam_is_the_cpus(weight: tuple[torch.dtype, Master], moments: Moments) -> None:
    pytest.importorskip("cupy")
    for numel in (33, 257, 70_001):
        on_cpu = make_job("adamw", numel, *weight, moments)
        on_gpu = make_job("adamw", numel, *weight, moments)
        on_gpu.weight = on_gpu.weight.cuda()
        on_gpu.state = {name: tensor.cuda() for name, tensor in on_gpu.state.items()}
        for step, grad in enumerate(gradients(numel, torch.bfloat16, 3), start=1):
            on_cpu.step(grad, step, 0.37)
            assert cuda_kernels.serves("adam", on_gpu.weight)
            assert on_gpu.step(grad.cuda(), step, 0.37)
        on_gpu.weight = on_gpu.weight.cpu()
        on_gpu.state = {name: tensor.cpu() for name, tensor in on_gpu.state.items()}
        assert_same(on_gpu, on_cpu, numel)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_plain_torch_on_the_gpu_is_the_cpus(
    weight: tuple[torch.dtype, Master], moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rules do for device tensors without the kernels."""
    monkeypatch.setattr(cuda_kernels, "serves", lambda *_: False)
    on_cpu, on_gpu = (make_job("adamw", 70_001, *weight, moments) for _ in range(2))
    on_gpu.weight = on_gpu.weight.cuda()
    on_gpu.state = {name: tensor.cuda() for name, tensor in on_gpu.state.items()}
    for step, grad in enumerate(gradients(70_001, torch.bfloat16, 3), start=1):
        on_cpu.step(grad, step, 0.37)
        on_gpu.step(grad.cuda(), step, 0.37)
    on_gpu.weight = on_gpu.weight.cpu()
    on_gpu.state = {name: tensor.cpu() for name, tensor in on_gpu.state.items()}
    assert_same(on_gpu, on_cpu, "torch")
