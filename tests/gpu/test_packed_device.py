"""Frozen weights are unpacked on a GPU to the CPU's bits, by our kernels and by plain torch."""

from __future__ import annotations

import pytest
import torch

from overspill.optim import packed, packed_device
from overspill.optim.packed_layout import FORMATS, Format
from tests.conformance.test_optim_packed import SHAPES, pack, unpack, weight_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_unpacked_there_is_unpacked_here(
    form: Format, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        pytest.importorskip("cupy")
        assert packed_device.serves(torch.zeros(1, device="cuda"))
    else:
        monkeypatch.setattr(packed_device, "serves", lambda tensor: False)
    for shape in SHAPES:
        parts, page = pack(form, weight_of(shape, dtype))
        expected = unpack(parts, page, dtype, "torch")
        weight = torch.full((parts.numel,), float("nan"), dtype=dtype, device="cuda")
        packed.unpack(parts, page.cuda(), weight)
        assert torch.equal(weight.cpu(), expected), shape
