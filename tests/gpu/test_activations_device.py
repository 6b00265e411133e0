"""Saved activations are packed on a GPU to the CPU's bits, by our kernels and by plain torch."""

from __future__ import annotations

import pytest
import torch

from overspill.optim import activation_blocks
from overspill.optim.activation_blocks import ActivationBlocks
from tests.conformance.test_optim_activations import SIZES, pack, same, unpack, values_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_there_is_packed_here(
    dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        pytest.importorskip("cupy")
        assert activation_blocks.serves(torch.zeros(1, device="cuda"))
    else:
        monkeypatch.setattr(activation_blocks, "serves", lambda tensor: False)
    blocks = ActivationBlocks(dtype)
    for numel in SIZES:
        values = values_of(numel, dtype)
        if numel > 200:
            values.view(dtype)[150] = float("inf")
        expected = pack(blocks, values, "torch")
        packed = torch.zeros(expected.numel(), dtype=torch.uint8, device="cuda")
        blocks.pack(values.cuda(), packed)
        assert torch.equal(packed.cpu(), expected), numel
        found = torch.zeros(values.numel(), dtype=torch.uint8, device="cuda")
        blocks.unpack(packed, found)
        assert same(found.cpu(), unpack(blocks, expected, values.numel(), "torch"), dtype), numel
