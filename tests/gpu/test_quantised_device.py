"""Weights are dequantised on a GPU to the CPU's bits, by our kernel and by plain torch."""

from __future__ import annotations

import pytest
import torch

from overspill.optim import quantised_device
from overspill.optim.quantised import Order
from tests.conformance.test_optim_quantised import (
    LAYOUTS,
    LONG_SHAPES,
    SHAPES,
    cases,
    dequantised,
    raw,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("order", "bits"), LAYOUTS)
def test_dequantised_there_is_dequantised_here(
    order: Order, bits: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        pytest.importorskip("cupy")
        assert quantised_device.serves(torch.zeros(1, device="cuda"))
    else:
        monkeypatch.setattr(quantised_device, "serves", lambda tensor: False)
    for case in cases(order, bits, [*SHAPES, *LONG_SHAPES], 3):
        expected = raw(dequantised(case, "torch"))
        assert torch.equal(raw(dequantised(case, "torch", "cuda")), expected), case
