"""State that goes to a GPU for its update and comes back: the same bits as without."""

from __future__ import annotations

import pytest
import torch

from overspill.planning.plan import Preference
from tests.parity.test_device_share import run, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits(update: str, precision: str) -> None:
    options = {
        "precision": precision, "host_memory": "64MiB", "activations": "keep",
        "device_memory": "2300KiB" if precision == "fp32" else "1600KiB",
    }  # fmt: skip
    seen = [run(Preference(visiting=x), update, options, "cuda") for x in (0.0, 0.4, 1.0)]
    assert seen[2][0] == 1
    same_bits(seen)
